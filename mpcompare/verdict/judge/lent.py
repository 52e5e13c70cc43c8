"""Did the backend write into the network or the batch, or patch torch?

- *Why.* A backend that writes into the network, or replaces a function of torch, makes every other check wrong.
- *Value.* Fingerprints of the network and of the first batch, before the first backend and after the examination. And
  the gradients of an exact step of 4 samples, in the backend's process and in one in which no backend has been.
- *Limit.* Fingerprints are equal, and gradients are within 2^-24.
"""

from mpcompare.verdict.judge.check import Case, Check, Checks

BECAUSE = {
    "network": "the network with the initial weights is not what it was: a backend copies it, and never writes into it",
    "batch": "the first batch is not what it was: a backend never writes into the inputs and targets of a step",
    "torch": "an exact step has other gradients in this process than in one without the backend: its module, or the "
    "backend, replaced a function of torch, and so its steps and their replays are wrong alike",
}


def checks(case: Case) -> Checks:
    """Yields a check for the network, the batch and torch. All other findings are computed from them."""
    written = case.run.findings.lent
    if written is None:
        return
    for name, because in BECAUSE.items():
        yield Check(f"writes into the {name}", float(name in written), 0, f"{name} written", because)
