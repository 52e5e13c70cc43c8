"""Do parameters, layers, loss and optimizer have the dtypes of the precision?

- *Value.* The observed dtypes of parameters, activations, gradients, loss and optimizer. Those of each layer of
  products (linear, convolutional, recurrent), forward and backward. The precision whose oracle the gradients fit.
- *Limit.* The dtypes that the precision promises. Where amp computes a product in the precision alone, the run does,
  too: fp32 may come to it, because a bias may be added in fp32, and another 16-bit format may not.
- *Free.* Norms, activations, attention and embeddings may compute in fp32 or in the precision: autocast, explicit casts
  and FSDP differ there. Softmax and loss compute in no 16-bit format unless amp does.
- *Another precision* fits only if the largest error is a quarter at its oracle, and every tensor is closer to it.
"""

import re
from collections.abc import Mapping

from mpcompare.precision import PRECISIONS
from mpcompare.verdict.judge.check import Case, Check, Checks, Examined

TECHNIQUES = {
    "params": "no master weights",
    "loss": "loss",
    "optimizer": "moments",
}  # the cause where another dtype is one of these
LOSS = "(loss)"  # the row of all that lies between the network's output and its gradient
# The classes of layers whose work is products, which autocast computes in the precision's format.
PRODUCTS = re.compile(r"(Bi)?Linear$|(Lazy)?Conv(Transpose)?[123]d$|(RNN|LSTM|GRU)(Cell)?$")


def checks(case: Case) -> Checks:
    """Yields a check of the layers, one for each dtype, one for the precision that the gradients show, and those of
    each layer's products and of the loss.

    A network whose output is not a product's may end in another dtype than it computes in: there the reference's is as
    good.
    """
    run, precision = case.run, case.run.precision
    first = run.findings.first.finite
    effective = (first.effective_precision if first else None) or precision
    formats = _formats(case)
    computed, nowhere = PRECISIONS[precision].storage.name, False
    if formats:
        nowhere = computed not in formats
        because = f"no layer computes in {computed}: all compute in {' and '.join(formats)}"
        yield Check("dtypes of layers", float(nowhere), 0, "precision", because, detail=_asked(run, formats))
    elsewhere = _asked(run, formats if nowhere else [effective]) if nowhere or effective != precision else ""
    for what, dtype in run.dtypes.items():
        expected = _expected(case, what)
        because = f"{what} in {dtype}, and precision={precision} means {' or '.join(expected)}"
        cause = TECHNIQUES.get(what, "precision")
        detail = elsewhere if cause == "precision" else ""
        yield Check(f"dtype of {what}", float(dtype not in expected), 0, cause, because, detail=detail)
    because = f"precision={precision}, and the gradients are those of {effective}"
    value = float(effective != precision)
    yield Check("effective precision", value, 0, "precision", because, detail=elsewhere)
    yield from _products(case)
    yield from _loss(case)
    yield from _others(case)


def _products(case: Case) -> Checks:
    """Yields two checks of each layer of products, of its forward and of its backward, where the reference computes
    them in the precision's format and in no other."""
    computed = PRECISIONS[case.run.precision].storage.name
    for name, expected in case.reference.layers.items():
        row = case.run.layers.get(name)
        if row is None or not PRODUCTS.match(expected["kind"]):
            continue
        for what, words in (("computes", "forward"), ("backward", "backward")):
            formats = _formats_of(row, what)
            if not formats or _formats_of(expected, what) != [computed]:
                continue
            wrong = computed not in formats or not {computed, "fp32"}.issuperset(formats)
            said = " and ".join(formats)
            because = f"{words} of {name} ({row['kind']}) computes in {said}, where {case.reference.name} does in "
            detail = f"asked for {case.run.precision}, {words} of {name} in {said}"
            yield Check(f"{words} of {name}", float(wrong), 0, "precision", because + computed, detail=detail)


def _loss(case: Case) -> Checks:
    """Yields a check of the softmax and the loss, forward and backward: whatever the precision, no 16-bit format stands
    there unless the reference computes in it, too. Its errors may be hidden among those of the products before it."""
    own, right = (of.layers.get(LOSS) for of in (case.run, case.reference))
    if own is None or right is None:
        return
    for what, words in (("computes", "forward"), ("backward", "backward")):
        short = sorted(_short() & {*_formats_of(own, what)} - {*_formats_of(right, what)})
        because = f"{words} of softmax and loss computes in {' and '.join(short)}, where {case.reference.name} does in "
        because += " and ".join(_formats_of(right, what))
        yield Check(f"{words} of {LOSS}", float(bool(short)), 0, "loss", because)


def _short() -> set[str]:
    return {name for name, precision in PRECISIONS.items() if precision.is_16_bit}


def _others(case: Case) -> Checks:
    """Yields a check of each other layer: a 16-bit format that is not the precision's holds other numbers, and stands
    nowhere unless the reference computes in it there, too."""
    short = _short() - {PRECISIONS[case.run.precision].storage.name}
    for name, expected in case.reference.layers.items():
        row = case.run.layers.get(name)
        if row is None or name == LOSS or PRODUCTS.match(expected["kind"]):
            continue
        own, right = ({*_formats_of(of, "computes"), *_formats_of(of, "backward")} for of in (row, expected))
        foreign = " and ".join(sorted(short & own - right))
        because = f"{name} ({row['kind']}) computes in {foreign} in training with {case.run.precision}"
        detail = f"asked for {case.run.precision}, {name} in {foreign}"
        yield Check(f"other formats in {name}", float(bool(foreign)), 0, "precision", because, detail=detail)


def _expected(case: Case, what: str) -> tuple[str, ...]:
    """Returns the names of the dtypes that are right, the promised one first."""
    computed, promises = PRECISIONS[case.run.precision].storage.name, case.run.findings.promises
    if what == "params":
        return (promises.weights,)
    if what == "optimizer":  # one that remembers nothing computes in the dtype of the weights
        return tuple(dict.fromkeys((promises.moments, promises.weights)))
    if what == "activations":
        return tuple(dict.fromkeys((computed, case.reference.dtypes[what])))
    return (computed, "fp32") if what == "gradients" else ("fp32",)


def _formats(case: Case) -> list[str]:
    """Returns the formats in which those layers compute that compute in the precision's in the reference; none where
    either is not known."""
    computed = PRECISIONS[case.run.precision].storage.name
    of_reference = {name for name, row in case.reference.layers.items() if computed in _formats_of(row, "computes")}
    rows = [row for name, row in case.run.layers.items() if name in of_reference and not name.startswith("(")]
    return sorted({dtype for row in rows for dtype in _formats_of(row, "computes")})


def _formats_of(row: Mapping[str, str], what: str) -> list[str]:
    return [dtype for dtype in row[what].split("+") if dtype != "-"]


def _asked(run: Examined, formats: list[str]) -> str:
    return f"asked for {run.precision}, computes in {' and '.join(formats)}"
