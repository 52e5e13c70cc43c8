"""Where each precision ran: the ``module_dtypes`` of the records as a table, and in words what differs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from mpcompare.records import write_atomically
from mpcompare.report.comparison import Comparison, Entry

WHAT = ("master", "weight", "input", "computes", "output", "gradient", "backward")
Rows = Mapping[str, Mapping[str, str]]  # by layer; each holds its kind, and dtypes by what they are of


def rows_of(entry: Entry) -> Rows:
    """Empty where nothing was seen."""
    return entry.run.result.get("module_dtypes") or {}


def observed(comparison: Comparison) -> list[Entry]:
    """The runs of which something was seen."""
    return [entry for entry in comparison.entries if rows_of(entry)]


def kinds(entries: Sequence[Entry]) -> dict[str, str]:
    """All layers, in the order of the run that shows most of them, the loss last."""
    found: dict[str, str] = {}
    for entry in sorted(entries, key=lambda e: -len(rows_of(e))):
        for layer, row in rows_of(entry).items():
            found.setdefault(layer, row["kind"])
    return dict(sorted(found.items(), key=lambda item: item[0] == "(loss)"))


def table(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """A row for each layer of each run."""
    found = [
        {"comparison": c.title, "run": e.run.name, "label": e.label, "layer": layer or "(model)", **row}
        for c in comparisons
        for e in observed(c)
        for layer, row in rows_of(e).items()
    ]
    return pd.DataFrame(found, columns=["comparison", "run", "label", "layer", "kind", *WHAT])


def write(comparisons: Sequence[Comparison], path: Path) -> None:
    """Writes :func:`table` as CSV, if any run shows anything."""
    if any(map(observed, comparisons)):
        write_atomically(path, lambda unfinished: table(comparisons).to_csv(unfinished, index=False))


def differing(entry: Entry, layer: str, reference: Entry | None) -> list[str]:
    """What of a layer is not in the reference's dtype; of what either does not show nothing is said."""
    mine, theirs = (rows_of(e).get(layer) if e else None for e in (entry, reference))
    if not mine or not theirs:
        return []
    return [what for what in WHAT if mine[what] != theirs[what] and "-" not in (mine[what], theirs[what])]


def differences(entry: Entry, reference: Entry | None) -> str:
    """In a line what forward does elsewhere than the reference, in which kinds of layers; empty if nothing."""
    found: dict[str, Counter[str]] = {}
    for layer, row in rows_of(entry).items():
        for what in differing(entry, layer, reference):
            if reference is not None and what in WHAT[:5]:
                text = f"{what} {row[what]} instead of {rows_of(reference)[layer][what]}"
                found.setdefault(text, Counter())[row["kind"]] += 1
    return "; ".join(
        f"{text} in {', '.join(kind if n == 1 else f'{n} {kind}' for kind, n in kinds.items())}"
        for text, kinds in sorted(found.items(), key=lambda item: WHAT.index(item[0].partition(" ")[0]))
    )


def lines(comparison: Comparison) -> list[str]:
    """:func:`differences` of each run whose baseline is in the same precision."""
    by_run = {id(entry.run): entry for entry in comparison.entries}
    found = []
    for entry in observed(comparison):
        reference = by_run.get(id(entry.baseline))
        alike = reference is not None and reference.run.result["precision"] == entry.run.result["precision"]
        if alike and reference is not None and (text := differences(entry, reference)):
            found.append(f"{entry.label} beside {reference.label}: {text}")
    return found
