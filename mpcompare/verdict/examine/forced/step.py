"""A recorded step compared with its forced replay: the error at each place of each layer, and what roundings make.

The replay is taken once in float64. Its differences from the record are the errors. It is taken some more times with
each result rounded. The differences of these samples from the first replay are the errors that a right step may have.
Some elements of a large tensor tell how large these errors are.
"""

import math
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from mpcompare.dtypes import HALF, dtype_name, torch_dtype
from mpcompare.precision import Precision
from mpcompare.verdict.examine.errors import gradient_errors
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic, Point
from mpcompare.verdict.examine.forced.choices import made_by
from mpcompare.verdict.examine.forced.digits import Ranges, digits_of
from mpcompare.verdict.examine.forced.hooks import without_hooked
from mpcompare.verdict.examine.forced.known import KnownLayers
from mpcompare.verdict.examine.forced.places import FP32, Errors, Place, worst_calls
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError
from mpcompare.verdict.examine.forced.record import OUTPUT, is_real
from mpcompare.verdict.examine.forced.replay import Recorded, Replay
from mpcompare.verdict.examine.forced.roundings import Roundings, convolves_in
from mpcompare.verdict.examine.forced.samples import EarlierSteps, statistics, take_samples, whole_numbers
from mpcompare.verdict.examine.forced.terms import find_terms
from mpcompare.verdict.examine.numerics import numbers
from mpcompare.verdict.judge.errors import GradientError, PlaceError, RoundingError
from mpcompare.verdict.judge.replayed import Layers

TOLD = ("input", "output", "gradient")  # the kinds of places that one more replay in fp32 is compared at
MANY = 4  # roundings that no limit is below: see ``judge.limits.roundings``


class InFloat64(Arithmetic):
    """Everything in float64. The differences from the record are the errors.

    Attributes:
        storage_dtype: the dtype of the precision.
        errors: the errors at all places.
        gradients: the errors of the gradients, by parameter.
        ranges: the numbers that 16 bits do not hold.
        products: the layers that no sample computes again.
    """

    is_exact = True

    def __init__(self, recorded: Recorded, precision: Precision) -> None:
        super().__init__(torch.float64)
        self.recorded, self.kept, self.storage_dtype = recorded, recorded.scale, torch_dtype(precision.storage)
        self.errors, self.ranges = Errors(len(recorded.batches)), Ranges(precision, recorded.scale)
        self.gradients: dict[str, GradientError | None] = {}
        roundings, network = Roundings(precision, recorded.scale), recorded.network
        roundings.convolves_in = convolves_in(self.storage_dtype, next(network.parameters()).device)
        dtype = torch.float32 if precision.is_16_bit else torch.float64
        self.products = KnownLayers(network, recorded.record, dtype, self.ranges.results, self.errors.sample, roundings)

    def compare(self, point: Point, seen: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
        if point.kind == "parameter":
            self.gradients.update(gradient_errors(self.recorded.grads, {point.layer: exact}))
            self.errors.compare(point, seen, exact, self.storage_dtype, self.gradients[point.layer])
        else:
            self.errors.compare(point, seen, exact, dtype)
        self.ranges.count(point, exact)
        if point.kind == "back":
            self.products.keep(point, exact)

    def whose(self, part: str, place: str) -> None:
        self.ranges.whose(part, place)


def compared_with_the_replay(recorded: Recorded, precision: Precision, earlier: EarlierSteps | None = None) -> Layers:
    """Returns the errors of a recorded step at all places of all layers, and of its gradients.

    Args:
        earlier: earlier steps. If one of them is like this step, its roundings replace samples; else this one is added.
    """
    recorded = replace(recorded, record=without_hooked(recorded.record, recorded.network))
    arithmetic = InFloat64(recorded, precision)
    errors, known, storage = arithmetic.errors, arithmetic.products, arithmetic.storage_dtype
    replay = recorded.new_replay(arithmetic)
    exact_loss = _run(replay, arithmetic)
    places = {point: place for point, place in errors.places.items() if point.kind not in ("parameter", "back")}
    noted = [choice for call in recorded.record.calls[OUTPUT] for choice in call.choices]
    layers = Layers(
        loss=recorded.loss,
        exact_loss=recorded.loss if exact_loss is None else exact_loss,
        loss_noise=errors.loss_noise,
        gradients={name: arithmetic.gradients[name] for name in replay.sums.sources},
        detached=list(dict.fromkeys(replay.detached)),
        as_given=replay.as_given,
        factor=replay.factors[-1] / recorded.scale,
        formats=_other_formats(errors, replay, storage),
        constants=sorted(replay.constants),
        loss_is_replayed=exact_loss is not None,
        choices=made_by(noted, replay.choosing.off, storage),
    )
    if earlier is not None and (carried := earlier.carried(precision, layers, places)):
        return carried
    known.drop_sums(replay.sums.sources)
    noise = take_samples(recorded, errors, known, layers.exact_loss)
    find_terms(recorded, errors, known)
    found = {point: _place(place, point, recorded) for point, place in places.items()}
    if not precision.is_16_bit and any(place.far > MANY for at, place in found.items() if at.kind in TOLD):
        once_more = OnceMoreInFp32(errors)
        with suppress(Exception):  # a network may not run once more in fp32: its places are judged without
            recorded.new_replay(once_more).run()
        found |= {point: replace(found[point], in_common=part) for point, part in once_more.in_common.items()}
    digits = digits_of(replay, recorded.loss, errors.places, arithmetic.ranges) if precision.is_16_bit else {}
    layers = replace(
        layers,
        loss_noise=max(errors.loss_noise, noise),
        places=worst_calls(found),
        other_whole_numbers=list(errors.whole),
        aside=sorted(recorded.record.aside),
        rounding={name: _of_gradient(errors, replay, precision.unit_roundoff, name) for name in replay.sums.sources},
        digits=digits,
    )
    if earlier is not None:
        earlier.kept.append((precision, layers))
    return layers


class OnceMoreInFp32(Arithmetic):
    """The network's own operations in fp32. A kernel may add up terms one by one. If they are equal, as for tokens that
    are equal, all roundings go in one direction. Samples round a kernel's result once, and do not show this.

    Attributes:
        in_common: by point the part of the record's error that is made here, too.
    """

    storage = torch.float32  # what the network casts to 16 bits stays in fp32

    def __init__(self, errors: Errors) -> None:
        super().__init__(torch.float32)
        self.errors = errors
        self.in_common: dict[Point, float] = {}

    def compare(self, point: Point, seen: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
        if point.kind in TOLD and point in self.errors.places:
            self.in_common[point] = self.errors.places[point].in_common(seen, exact)


def _run(replay: Replay, arithmetic: InFloat64) -> float | None:
    """Runs the exact replay, compares the recorded buffers with the replay's buffers, and returns its loss. Raises
    NotReplayedError where a layer of the step is not called."""
    with arithmetic.ranges:
        loss = replay.run()
    if missed := replay.not_called():
        raise NotReplayedError(f"{missed[0]} is not called when the network is called again: it draws other numbers")
    shown = replay.step.buffers
    judged = shown.keys() - replay.record.aside
    pairs = ((name, b, shown[name]) for name, b in whole_numbers(replay) if name in judged)
    arithmetic.errors.whole = {n: b for n, b, seen in pairs if seen.shape == b.shape and bool((seen != b).any())}
    for name, b in statistics(replay):
        if (seen := replay.step.buffers.get(name)) is not None:
            if (seen := numbers(seen)).shape != b.shape:  # a wrong buffer may be real where the right one is complex
                seen = numbers(seen.to(seen.dtype.to_complex()))
            arithmetic.errors.compare(Point("buffer", name), seen, b, seen.dtype)
    return loss


def _other_formats(errors: Errors, replay: Replay, storage: torch.dtype) -> dict[str, str]:
    """Returns, by place, a format of 16 bits that is not the format of the precision. The numbers of the place were
    seen in it, or the network itself asked for it on the way there."""
    formats = [(point.name, place.dtype) for point, place in errors.places.items() if point.kind != "parameter"]
    formats += [(at, dtype) for at, asked in replay.casts.items() for dtype in asked]
    return {at: dtype_name(dtype) for at, dtype in formats if dtype in HALF and dtype is not storage}


def _of_gradient(errors: Errors, replay: Replay, u: float, name: str) -> RoundingError:
    """Returns the error that roundings make in a gradient. The gradient of an embedding, or of a norm's shift, that is
    held in fp32 is an fp32 sum of known terms. Its error is 2^-24 of the terms, times the root of their number. The
    terms of a gain's gradient are products with the normed numbers, which may be rounded (transformers#33133)."""
    place = errors.places[Point("parameter", name)]
    rounding = replace(place.rounding(), cancelled=place.cancelled(u, _terms(replay, name)))
    if name in replay.gains:
        return replace(rounding, error=max(rounding.error, u / math.sqrt(3) * rounding.terms))
    if name not in replay.in_fp32 or len(replay.sums.sources[name]) > 1:
        return rounding
    part = min(FP32 / u * math.sqrt(replay.in_fp32[name]), 1.0)
    return replace(rounding, error=part * rounding.error, along=part * rounding.along, zeros=0.0)


def _terms(replay: Replay, name: str) -> float:
    """Returns about how many terms a gradient sums: the number of its layers' outputs for each of its rows."""
    layers = [replay.record.calls.get(layer, []) for layer in replay.sums.sources[name]]
    numbers = sum(v.numel() for calls in layers for call in calls for v in call.outputs if is_real(v))
    shape = replay.network.get_parameter(name).shape
    return max(numbers / max(shape[0] if shape else 1, 1), 1.0)


def _place(place: Place, point: Point, recorded: Recorded) -> PlaceError:
    """Returns the error at a place. In a buffer of 16 bits, such as a queue of keys, the network rounds what it
    keeps."""
    rounding, b = place.rounding(), recorded.buffers.get(point.layer) if point.kind == "buffer" else None
    u = torch.finfo(b.dtype).eps / 2 if b is not None and b.dtype in HALF else 0.0
    made = max(rounding.error, u * place.norm)
    return PlaceError.of(place.error, place.norm, replace(rounding, error=made))
