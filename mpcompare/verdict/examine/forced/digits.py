"""The digits that 16 bits lose at each layer: cancellation, overflow and underflow, from the replays of one step.

Each number is measured at one layer with the operands that the step had there, so no layer is blamed for another one.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpcompare.precision import FP16, Precision
from mpcompare.verdict.examine.forced.arithmetic import Point
from mpcompare.verdict.examine.forced.places import Place
from mpcompare.verdict.examine.forced.record import OUTPUT, Call
from mpcompare.verdict.examine.forced.replay import Replay
from mpcompare.verdict.examine.forced.roundings import computed
from mpcompare.verdict.judge.replayed import Digits

MASK = 2.0**127  # numbers from here on stand for infinity, such as the numbers of a mask
VARIANCE = 3  # a rounding that is uniform in +- u has the variance u^2 / 3


class Ranges(TorchDispatchMode):
    """Notes which places compute something while it is entered, and which numbers are beyond fp16 there. bf16 has the
    range of fp32.

    Attributes:
        results: by part of the step and layer the number of results that a precision rounds.
        beyond: by layer, or ``before LAYER``, the first operator with a result beyond fp16, the largest number in that
            result, and whether the operator is one of backward; None where there is no such operator.
        overflow, underflow: by layer the largest share of its output, or of the gradient that arrives there, that is
            beyond fp16; and the share of this gradient below fp16's normal numbers.
    """

    def __init__(self, precision: Precision, scale: float) -> None:
        super().__init__()
        self.u, self.narrow = precision.unit_roundoff, precision.storage == FP16
        self.scale = scale
        self.part, self.place = "", ""
        self.results: Counter[tuple[str, str]] = Counter()
        self.beyond: dict[str, tuple[str, float, bool] | None] = {}
        self.overflow: dict[str, float] = defaultdict(float)
        self.underflow: dict[str, float] = defaultdict(float)

    def whose(self, part: str, place: str) -> None:
        """Is told whose operators come next: see ``Arithmetic.whose``."""
        if not part and "" in self.beyond:
            self._put(f"before {place}", self.beyond.pop(""))
        self.part, self.place = part, place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.part:
            for value in computed(func, (args, kwargs), result):
                self.results[self.part, self.place] += 1
                top = _largest(value) if self.narrow else 0.0
                beyond = top > FP16.maximum
                self._put(self.place, (_operator(func, args), top, self.part == "backward") if beyond else None)
        return result

    def count(self, point: Point, exact: Tensor) -> None:
        """Counts the numbers of an output, or of a gradient that arrives there, that fp16 does not hold."""
        if not self.narrow or point.kind not in ("output", "gradient") or not exact.numel():
            return
        backward = point.kind == "gradient"
        size = exact.detach().abs() * (self.scale if backward else 1.0)
        share = float(((size > FP16.maximum) & (size < MASK)).double().mean())
        self.overflow[point.layer] = max(share, self.overflow[point.layer])
        if backward and (numbers := int(size.count_nonzero())):
            share = int(((size > 0) & (size < FP16.smallest_normal)).sum()) / numbers
            self.underflow[point.layer] = max(share, self.underflow[point.layer])

    def _put(self, place: str, beyond: tuple[str, float, bool] | None) -> None:
        self.beyond[place] = self.beyond.get(place) or beyond


def _largest(value: Tensor) -> float:
    size = value.detach().abs()
    return float(size.masked_fill_(~(size < MASK), 0.0).max()) if value.numel() else 0.0


def _operator(func: Any, args: Any) -> str:
    """Returns the name of an operator; ``square`` for every operator that squares."""
    name = str(func._schema.name).partition("::")[2].rstrip("_")
    squares = (name == "pow" and not isinstance(args[1], Tensor) and args[1] == 2) or (
        name == "mul" and args[0] is args[1]
    )
    return "square" if squares else name


def digits_of(replay: Replay, loss: float, compared: Mapping[Point, Place], ranges: Ranges) -> dict[str, Digits]:
    """Returns what 16 bits cost at each layer and in the work before it, in the order of forward.

    Args:
        replay: the replay in float64, when it has run.
        compared: the places at which it was compared.
        ranges: the ranges of this replay.
    """

    def of(points: Iterable[Point]) -> tuple[float, float]:
        """Returns the error of some tensors as one vector, and the size of their terms, relative to their norm."""
        known = [compared[point] for point in points if point in compared]
        norm, roundings = math.hypot(*(place.norm for place in known)), [place.rounding() for place in known]
        terms = math.hypot(*(each.terms for each in roundings))
        error = math.hypot(ranges.u * terms / math.sqrt(VARIANCE), *(each.error for each in roundings))
        return (error / norm, terms / norm) if norm else (math.inf if error else 0.0, 1.0)

    places: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in compared:
        places[point.kind, point.layer].append(point)
    found: dict[str, Digits] = {}
    for layer in dict.fromkeys(point.layer for point in compared if point.kind == "output"):
        before = f"before {layer}"
        if before in ranges.beyond:
            output, terms = of(places["output" if layer == OUTPUT else "input", layer])
            found[before] = Digits("", output, 0.0, terms, 0.0, 0.0, 0.0, 0.0, *(ranges.beyond[before] or ()))
        if layer == OUTPUT or layer not in ranges.beyond:  # such a layer selects numbers, and rounds none
            continue
        output, terms = of(places["output", layer])
        own = of(Point("parameter", name) for name, layers in replay.sums.sources.items() if layer in layers)
        gradient, gradient_terms = max(own, of(places["back", layer]))
        moved = ranges.u / math.sqrt(VARIANCE) * _terms_of_loss(replay.record.calls[layer]) / replay.scale
        found[layer] = Digits(
            type(replay.network.get_submodule(layer)).__name__,
            output, gradient, terms, gradient_terms, moved / abs(loss) if loss else math.inf,
            ranges.overflow[layer], ranges.underflow[layer], *(ranges.beyond.get(layer) or ()),
        )  # fmt: skip
    return found


def _terms_of_loss(calls: Iterable[Call]) -> float:
    """Returns the norm of the products of a layer's outputs and the gradients that arrived there: how much a relative
    change of each output moves the scaled loss."""
    pairs = [(y, g) for call in calls for y, g in zip(call.outputs, call.gradients, strict=True) if g is not None]
    return math.hypot(*(float((y.double() * g.double()).nan_to_num_(0.0, 0.0, 0.0).norm()) for y, g in pairs))
