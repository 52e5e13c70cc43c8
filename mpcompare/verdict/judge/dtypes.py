"""The precision: dtypes as observed, and as the errors show."""

from collections.abc import Iterator

from mpcompare.precision import PRECISIONS
from mpcompare.verdict.judge.check import Case, Check

TECHNIQUES = {"params": "no master weights", "loss": "loss"}  # the cause where another dtype is one of these


def checks(case: Case) -> Iterator[Check]:
    """Yields a check for each dtype, and one for the precision that the gradients show.

    A network whose output is not a product's may end in another dtype than it computes in: there the reference's is as
    good.
    """
    run, precision = case.run, case.run.precision
    computed = PRECISIONS[precision].storage.name
    promised = {"activations": (computed,), "gradients": (computed, "fp32")}
    for what, dtype in run.dtypes.items():
        expected = promised.get(what, ("fp32",))
        if what == "activations":
            expected = tuple(dict.fromkeys((*expected, case.reference.dtypes[what])))
        because = f"{what} in {dtype}, and precision={precision} means {' or '.join(expected)}"
        yield Check(f"dtype of {what}", float(dtype not in expected), 0, TECHNIQUES.get(what, "precision"), because)
    first = run.findings.first.finite
    effective = (first.effective_precision if first else None) or precision
    because = f"precision={precision}, and the gradients are those of {effective}"
    yield Check("effective precision", float(effective != precision), 0, "precision", because)
