"""The errors that a right step may have, found by replays whose numbers are rounded.

A sample rounds the result of each operation. The differences of a few samples from the exact replay are the errors that
roundings make. Samples cost most of a comparison, and a few updates move weights little. So an earlier step is a first
measure for a later one. It accuses nobody: a step that is beyond it is compared once more, with samples of its own.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mpcompare.dtypes import HALF
from mpcompare.instruments import heap
from mpcompare.precision import Precision
from mpcompare.tasks.cast import NORMS, stays_in_fp32
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic, Point
from mpcompare.verdict.examine.forced.known import KnownLayers
from mpcompare.verdict.examine.forced.own_products import is_torchs
from mpcompare.verdict.examine.forced.places import Errors, Place, worst_calls
from mpcompare.verdict.examine.forced.random_numbers import OtherPathError
from mpcompare.verdict.examine.forced.record import OUTPUT, is_real
from mpcompare.verdict.examine.forced.replay import Recorded, Replay
from mpcompare.verdict.examine.forced.roundings import in_operations
from mpcompare.verdict.examine.numerics import numbers
from mpcompare.verdict.examine.unseen import Unseen
from mpcompare.verdict.judge.limits import COARSEST, K
from mpcompare.verdict.judge.replayed import Layers

SAMPLES, MOST = 4, 12  # samples of roundings: more than a few if roundings are a large part of a tensor


class RoundedResults(Arithmetic):
    """Each result is rounded: a sample of the errors that a right step may have.

    Attributes:
        narrow, wide: the norms whose numbers all have 16 bits, and the norms and embeddings that are given fp32 alone.
    """

    def __init__(self, recorded: Recorded, errors: Errors, known: KnownLayers) -> None:
        super().__init__(known.dtype)
        self.errors, self.known, self.roundings = errors, known, known.roundings
        self.storage = known.roundings.adds_in
        self.narrow, self.wide = _norms_in(recorded)
        self._cancels_in, self._smallest = self.roundings.cancels_in, self.roundings.smallest

    def compare(self, point: Point, seen: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
        self.errors.sample(self.roundings, point, exact)

    def passing(self, part: str) -> None:
        self.roundings.passing(part)

    def whose(self, part: str, place: str) -> None:
        self.roundings.cancels_in = self.storage if place in self.narrow else self._cancels_in
        # Within such a layer fp32 holds numbers that are too small for fp16, such as a variance.
        self.roundings.smallest = 0.0 if part and place in self.wide else self._smallest

    def operand(self, operand: Tensor) -> Tensor:
        # The first call of a checkpoint has no gradients. It is rounded as the second, or a repeated call is not found.
        return self.roundings.quantity(operand)

    def stored(self, value: Tensor) -> Tensor:
        with Unseen():  # nothing rounds the operations of a rounding
            return self.roundings.round_(value.clone())

    def cast(self, constants: Tensor, kind: torch.dtype, roundings: int = 1) -> Tensor:
        return self.roundings.cast(constants, kind, roundings)

    def summed(self, part: Tensor) -> Tensor:
        return self.roundings.round_(part)


def take_samples(recorded: Recorded, errors: Errors, known: KnownLayers, loss: float) -> float:
    """Finds how large roundings are at each point. A replay that sends rows to another expert is no sample. Returns the
    error that roundings make in the exact ``loss``: twice the standard deviation of the samples' losses, because few
    samples may be close by luck. It is 0 where nothing rounded is in it.

    Args:
        known: the layers that no sample computes, with the roundings of the samples.

    Raises:
        OtherPathError: every replay sends rows to another expert.
    """
    heap.trim()  # the samples have tensors of the same sizes, and of other sizes than the exact replay
    taken, other, roundings = 0, None, known.roundings
    squares: list[float] = []
    rounded = RoundedResults(recorded, errors, known)
    for roundings.sample in range(MOST):
        if taken == SAMPLES and not errors.blind():
            break
        again = recorded.new_replay(rounded)
        try:
            with roundings, in_operations(recorded.network):
                found = again.run()
        except OtherPathError as error:
            other = error
            continue
        taken += 1
        if again.loss_is_rounded and found is not None and math.isfinite(found):
            squares.append((found - loss) ** 2)
        for name, b in statistics(again):
            errors.sample(roundings, Point("buffer", name), b)
        # Numbers that depend on roundings, such as a count of rows that a router sends somewhere, are not judged.
        errors.whole = {
            name: b for name, b in whole_numbers(again) if name in errors.whole and b.equal(errors.whole[name])
        }
    if not taken and other is not None:
        raise other
    return 2 * math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def statistics(replay: Replay) -> Iterator[tuple[str, Tensor]]:
    """Yields the real numbers of buffers as a replay leaves them, such as the running statistics of norms. A sparse
    buffer holds none: it is a matrix that the network multiplies by."""
    dense = ((name, b) for name, b in replay.network.named_buffers() if b.layout is torch.strided)
    yield from ((name, numbers(b)) for name, b in dense if b.is_floating_point() or b.is_complex())


def whole_numbers(replay: Replay) -> Iterator[tuple[str, Tensor]]:
    """Yields the other buffers as a replay leaves them: tables of whole numbers, masks, and counts of calls."""
    dense = ((name, b) for name, b in replay.network.named_buffers() if b.layout is torch.strided)
    yield from ((name, b) for name, b in dense if not (b.is_floating_point() or b.is_complex()))


def _norms_in(recorded: Recorded) -> tuple[set[str], set[str]]:
    """Returns the names of torch's own norms that had numbers of 16 bits alone: torch keeps their statistics in 16
    bits, too, and the gradient that they pass down is a small rest of rounded terms. And returns the names of the norms
    and embeddings that were given numbers of fp32 alone."""
    narrow, wide = set(), set()
    for name, calls in recorded.record.calls.items():
        if name == OUTPUT:
            continue
        module = recorded.network.get_submodule(name)
        given = {dtype for c in calls for dtype in (*c.held.values(), *(v.dtype for v in c.inputs if is_real(v)))}
        made = {v.dtype for c in calls for v in c.outputs if is_real(v)}
        if isinstance(module, NORMS) and is_torchs(module) and given | made <= set(HALF):
            narrow.add(name)
        if given == {torch.float32} and stays_in_fp32(module):
            wide.add(name)
    return narrow, wide


@dataclass
class EarlierSteps:
    """Steps that were compared with samples, and the precision of each. A network may have several sorts of steps, as a
    network with two losses has."""

    kept: list[tuple[Precision, Layers]] = field(default_factory=list)

    def carried(self, precision: Precision, later: Layers, places: Mapping[Point, Place]) -> Layers | None:
        """Returns a later step with the roundings of the first earlier step that has roundings of all these places and
        gradients; None where none has. The roundings must be a small part of their tensors: else a later step may be
        seen better than the earlier one."""
        names = {point.name for point in places}
        for own, earlier in self.kept:
            small = {at for at, place in earlier.places.items() if K * place.rounding < COARSEST * place.norm}
            errors = ((name, e, K * earlier.rounding[name].error) for name, e in earlier.gradients.items() if e)
            gradients = {name for name, e, rounding in errors if rounding < COARSEST * e.norm}
            if own == precision and names <= small and later.gradients.keys() <= gradients:
                return _carried(earlier, later, places)
        return None


def _carried(earlier: Layers, later: Layers, places: Mapping[Point, Place]) -> Layers:
    """Returns a later step with roundings that are the same share of each norm as in an earlier step, and at least the
    same share of the loss."""
    errors, rounding = {}, {}
    for point, place in places.items():
        known = earlier.places[point.name]
        part = place.norm / known.norm
        scaled = {each: part * getattr(known, each) for each in ("rounding", "terms", "common")}
        errors[point] = replace(known, error=place.error, norm=place.norm, in_common=0.0, **scaled)
    for name, e in later.gradients.items():
        once, before = earlier.rounding[name], earlier.gradients[name]
        part = e.norm / before.norm if e and before else 1.0
        scaled = {each: part * getattr(once, each) for each in ("error", "along", "terms", "common")}
        rounding[name] = replace(once, **scaled)
    part = abs(later.exact_loss / earlier.exact_loss) if earlier.exact_loss else 1.0
    noise = max(later.loss_noise, part * earlier.loss_noise)
    return replace(later, places=worst_calls(errors), rounding=rounding, loss_noise=noise)
