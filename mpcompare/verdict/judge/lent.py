"""A backend writes into nothing that is lent to it: the network with its initial weights, the batches, and torch."""

from collections.abc import Iterator

from mpcompare.verdict.judge.check import Case, Check

BECAUSE = {
    "network": "the network with the initial weights is not what it was: a backend copies it, and never writes into it",
    "batch": "the first batch is not what it was: a backend never writes into the inputs and targets of a step",
    "torch": "an exact step has other gradients in this process than in one without the backend: its module, or the "
    "backend, replaced a function of torch, and so its steps and their replays are wrong alike",
}


def checks(case: Case) -> Iterator[Check]:
    """Yields a check for each. All other findings are computed from them."""
    written = case.run.findings.lent
    if written is None:
        return
    for name, because in BECAUSE.items():
        yield Check(f"writes into the {name}", float(name in written), 0, f"{name} written", because)
