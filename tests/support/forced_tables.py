"""The forced replay on networks of others: what it sees of correct backends, and of mutations; rows of docs/power."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from support.backends import BACKENDS
from support.drawn import DRAWN
from support.foreign import NETWORKS, Network
from support.mutations import layers_of, mutated, subject_of

from mpcompare.backends.amp import Amp
from mpcompare.errors import BackendUnavailable
from mpcompare.verdict.judge.check import Case, Check
from mpcompare.verdict.judge.layers import checks as layer_checks
from mpcompare.verdict.judge.layers import doubt
from mpcompare.verdict.judge.sight import sight

EVERY: Sequence[Network] = (*NETWORKS, *DRAWN)


@dataclass(frozen=True)
class Nearest:
    """The check that comes nearest to its limit."""

    share: float
    name: str

    @classmethod
    def of(cls, checks: Sequence[Check]) -> "Nearest":
        check = max((c for c in checks if c.limit), key=lambda c: c.value / c.limit)
        return cls(check.value / check.limit, check.name)


def cases(only: str, precisions: Sequence[str]) -> Iterator[tuple[Network, str]]:
    """Yields the networks whose names hold ``only``, in each precision for which torch has kernels."""
    for network in EVERY:
        for precision in precisions:
            if only in network.name and _runs(network, precision):
                yield network, precision


def _runs(network: Network, precision: str) -> bool:
    subject = subject_of(network, precision, Amp)
    try:
        subject.make_backend(subject.model, subject.scaling)
    except BackendUnavailable:
        return False
    return True


def forced_row(network: Network, precision: str) -> dict[str, str]:
    """Returns the row of a network: what is seen of ``amp``, and how near it and ``master_weights`` come to a limit.

    ``amp`` is held to roundings alone, as where there is no reference; ``master_weights`` to roundings and to ``amp``.
    How many zeros may cancel is known from a reference only.
    """
    start = time.monotonic()
    amp, other = (
        layers_of(subject_of(network, precision, make), name)
        for name, make in (("amp", Amp), ("master_weights", BACKENDS["master_weights"]))
    )
    alone = replace(amp, name="none", findings=replace(amp.findings, replays={}))
    own = [c for c in layer_checks(Case(replace(amp, name="run"), alone)) if not c.name.startswith("zeros")]
    checks = list(layer_checks(Case(other, amp)))
    seen = sight(Case(other, amp))
    assert seen is not None
    trained = [n for n, p in network.make().named_parameters() if p.requires_grad]
    gradients = amp.findings.replays["first"].gradients
    unused = [n for n in trained if gradients.get(n) is None]
    unseen = [n for n in seen.unseen if n not in unused]
    failed = [c.name for c in checks if not c.passed]
    nearest = Nearest.of(own), Nearest.of(checks)
    return {
        "network": network.name,
        "library": network.library,
        "precision": precision,
        "parameters": str(len(trained)),
        "unused": str(len(unused)),
        "seen": str(len(trained) - len(unused) - len(unseen)),
        "not seen": ", ".join([*unseen, *(f"layer {name}" for name in seen.layers)]),
        "resolution": f"{seen.resolution:.2g}",
        "amp alone": f"{nearest[0].share:.2f}",
        "where": nearest[0].name,
        "master_weights": f"{nearest[1].share:.2f}",
        "where there": nearest[1].name,
        "seconds": f"{time.monotonic() - start:.1f}",
        "amp itself": doubt(amp),
        "accused": "; ".join(failed),
    }


def mutation_rows(network: Network, precision: str, places: int) -> Iterator[dict[str, str]]:
    """Yields a row for each kind of mutation that fits a network: how many were tried, flagged, and named, that is, in
    the sentence of the verdict."""
    found = list(mutated(network, precision, places))
    for kind in dict.fromkeys(each.mutation for each in found):
        of = [each for each in found if each.mutation == kind]
        yield {
            "network": network.name,
            "precision": precision,
            "mutation": kind,
            "tried": str(len(of)),
            "flagged": str(sum(bool(each.failed) for each in of)),
            "named": str(sum(each.named for each in of)),
            "not flagged": "; ".join(f"{each.place}: {each.effect:.1f}" for each in of if not each.failed),
            "not named": "; ".join(
                f"{each.place}: {each.failed[0].because}" for each in of if each.failed and not each.named
            ),
        }


def put(rows: Sequence[dict[str, str]], file: Path) -> None:
    """Puts rows into a table, in the order of ``EVERY``, in place of older ones of the same networks."""
    kept = pd.read_csv(file, dtype=str, keep_default_na=False).to_dict("records") if file.exists() else []
    new = {(row["network"], row["precision"]) for row in rows}
    kept = [row for row in kept if (row["network"], row["precision"]) not in new]
    order = {network.name: place for place, network in enumerate(EVERY)}
    table = sorted([*kept, *rows], key=lambda row: (order[row["network"]], row["precision"]))
    pd.DataFrame(table).to_csv(file, index=False)
