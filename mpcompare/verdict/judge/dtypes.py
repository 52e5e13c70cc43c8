"""Do parameters, layers, loss and optimizer have the dtypes of the precision?

- *Value.* The observed dtypes of parameters, activations, gradients, loss and optimizer. The dtypes of each layer of
  products (linear, convolutional, recurrent), forward and backward. The precision whose oracle the gradients fit.
- *Limit.* The dtypes that the precision promises. Where amp computes a product only in the precision, the run must,
  too. fp32 is allowed in addition, because a bias may be added in fp32. The other 16-bit format is not.
- *A loss of your own*, or of the network: the format that the reference has under autocast is right, too.
- *Free.* Norms, activations, attention and embeddings may compute in fp32 or in the precision: autocast, explicit casts
  and FSDP differ there. Softmax and loss compute in no 16-bit format unless amp does.
- *Another precision* is named only if the gradients fit its oracle better: the largest error is at most a quarter, and
  every tensor is closer. The tensor with that error must be seen, because roundings may move others by far more, as
  where they send rows to other experts. And the forced replay must not show the precision asked for, as where a unit
  at its kink turns in the oracle: an error within its roundings, and not as small as those of a finer one.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping

from mpcompare.fields import LOSS
from mpcompare.precision import PRECISIONS
from mpcompare.verdict.judge.check import Case, Check, Checks, Examined
from mpcompare.verdict.judge.errors import Errors, RoundingErrors, relative_error
from mpcompare.verdict.judge.limits import COARSEST, K
from mpcompare.verdict.judge.replayed import Layers

# The cause where another dtype is one of these.
TECHNIQUES = {"params": "no master weights", "loss": "loss", "optimizer": "moments"}
Row = Mapping[str, str]  # a row of ``Examined.layers``
SHORT = {name for name, precision in PRECISIONS.items() if precision.is_16_bit}  # with fewer digits than fp32
# The classes of layers whose work is products, which autocast computes in the precision's format.
PRODUCTS = re.compile(r"(Bi)?Linear$|(Lazy)?Conv(Transpose)?[123]d$|(RNN|LSTM|GRU)(Cell)?$")
COLUMNS = {"forward": "computes", "backward": "backward"}  # the columns of a row


def checks(case: Case) -> Checks:
    """Yields a check of the layers, one for each dtype, one for the precision that the gradients show, and the checks
    of each layer's products and of the loss.

    A network whose output is not a product's may end in another dtype than it computes in. There the reference's dtype
    is right, too.
    """
    run, precision = case.run, case.run.precision
    effective = _effective(run)
    formats, computed = _formats(case), _computed(case)
    nowhere = bool(formats) and computed not in formats
    elsewhere = _asked(run, formats if nowhere else [effective]) if nowhere or effective != precision else ""
    if formats:
        because = f"no layer computes in {computed}: all compute in {' and '.join(formats)}"
        yield Check("dtypes of layers", float(nowhere), 0, "precision", because, detail=_asked(run, formats))
    for what, dtype in run.dtypes.items():
        expected = _expected(case, what)
        because = f"{what} in {dtype}, and precision={precision} means {' or '.join(expected)}"
        cause = TECHNIQUES.get(what, "precision")
        detail = elsewhere if cause == "precision" else ""
        yield Check(f"dtype of {what}", float(dtype not in expected), 0, cause, because, detail=detail)
    because = f"precision={precision}, and the gradients are as in {effective}"
    yield Check("effective precision", float(effective != precision), 0, "precision", because, detail=elsewhere)
    yield from _products(case)
    yield from _loss(case)
    yield from _others(case)


def _effective(run: Examined) -> str:
    """Returns the precision that the gradients of the first step show."""
    first, replay = run.findings.first.finite, run.findings.replays.get("first")
    if first is None or not first.effective_precision:
        return run.precision
    other, rounding = first.effective_precision, replay.rounding if replay else run.findings.rounding
    return run.precision if shows_no_other(run.precision, [other], first.gradients, rounding, replay) else other


def shows_no_other(
    asked: str, others: Collection[str], gradients: Errors, rounding: RoundingErrors, replay: Layers | None
) -> bool:
    """Returns whether gradients show the precision asked for, even if they are near to another: they are so by luck.
    The tensor with the largest error is not seen, or the forced replay shows the precision asked for: an error within
    its roundings, and not so small that it is nearer to the roundings of a finer one."""
    worst = max(gradients, key=lambda name: relative_error(gradients[name]))
    e, once = gradients[worst], rounding.get(worst)
    if e is None or once is None:
        return False
    replayed = replay.gradients.get(worst) if replay else None
    finer = [PRECISIONS[other].unit_roundoff / PRECISIONS[asked].unit_roundoff for other in others]
    least = max(math.sqrt(each) if each < 1 else 0.0 for each in finer)
    is_replayed = replayed is not None and least * once.error <= replayed.error <= K * once.error
    return once.error > COARSEST * e.norm or is_replayed


def _products(case: Case) -> Checks:
    """Yields two checks of each layer of products, of its forward and of its backward, where the reference computes
    them in the precision's format and in no other."""
    computed = _computed(case)
    for name, row, expected in _of_both(case):
        if not PRODUCTS.match(expected["kind"]):
            continue
        for pass_, column in COLUMNS.items():
            formats = _formats_of(row, column)
            if not formats or _formats_of(expected, column) != [computed]:
                continue
            wrong = computed not in formats or not {computed, "fp32"}.issuperset(formats)
            said = " and ".join(formats)
            because = f"{pass_} of {name} ({row['kind']}) computes in {said}, where {case.reference.name} does in "
            detail = f"asked for {case.run.precision}, {pass_} of {name} in {said}"
            yield Check(f"{pass_} of {name}", float(wrong), 0, "precision", because + computed, detail=detail)


def _loss(case: Case) -> Checks:
    """Yields a check of the softmax and the loss, forward and backward: whatever the precision, no 16-bit format stands
    there unless the reference computes in it, too. The errors of the products before the loss may hide its own."""
    own, right = (of.layers.get(LOSS) for of in (case.run, case.reference))
    if own is None or right is None:
        return
    for pass_, column in COLUMNS.items():
        expected = _formats_of(right, column)
        short = sorted(SHORT & {*_formats_of(own, column)} - {*expected})
        because = f"{pass_} of softmax and loss computes in {' and '.join(short)}, where {case.reference.name} does in "
        yield Check(f"{pass_} of {LOSS}", float(bool(short)), 0, "loss", because + " and ".join(expected))


def _others(case: Case) -> Checks:
    """Yields a check of the weights of each layer, and of all of each other layer: a 16-bit format that is not the
    precision's holds other numbers, and stands nowhere unless it was declared or the reference has it there, too."""
    known = {_computed(case), case.run.findings.promises.weights}
    for name, row, expected in _of_both(case):
        if name == LOSS:
            continue
        columns = ["weight", *([] if PRODUCTS.match(expected["kind"]) else COLUMNS.values())]
        own, right = ({f for column in columns for f in _formats_of(of, column)} for of in (row, expected))
        foreign = " and ".join(sorted((SHORT & own) - right - known))
        because = f"{name} ({row['kind']}) has numbers in {foreign} in training with {case.run.precision}"
        detail = f"asked for {case.run.precision}, {name} in {foreign}"
        yield Check(f"other formats in {name}", float(bool(foreign)), 0, "precision", because, detail=detail)


def _expected(case: Case, what: str) -> tuple[str, ...]:
    """Returns the names of the dtypes that are right, the promised one first."""
    computed, promises = _computed(case), case.run.findings.promises
    if what == "params":
        return (promises.weights,)
    if what == "optimizer":  # an optimizer that remembers nothing computes in the dtype of the weights
        return tuple(dict.fromkeys((promises.moments, promises.weights)))
    if what == "activations":
        return tuple(dict.fromkeys((computed, case.reference.dtypes[what])))
    if what == "loss" and case.run.findings.recipe.own_loss:
        return tuple(dict.fromkeys(("fp32", case.reference.dtypes[what])))
    return (computed, "fp32") if what == "gradients" else ("fp32",)


def _formats(case: Case) -> list[str]:
    """Returns the formats of the layers that compute in the precision's format in the reference; none where the layers
    of either are not known."""
    found: set[str] = set()
    for name, row, expected in _of_both(case):
        if _computed(case) in _formats_of(expected, "computes") and not name.startswith("("):
            found.update(_formats_of(row, "computes"))
    return sorted(found)


def _of_both(case: Case) -> Iterator[tuple[str, Row, Row]]:
    """Yields the layers that both have, each with the row of the run and the row of its reference."""
    for name, expected in case.reference.layers.items():
        if name in case.run.layers:
            yield name, case.run.layers[name], expected


def _computed(case: Case) -> str:
    """Returns the format of the precision that was asked for."""
    return PRECISIONS[case.run.precision].storage.name


def _formats_of(row: Row, column: str) -> list[str]:
    return [dtype for dtype in row.get(column, "-").split("+") if dtype != "-"]


def _asked(run: Examined, formats: list[str]) -> str:
    return f"asked for {run.precision}, computes in {' and '.join(formats)}"
