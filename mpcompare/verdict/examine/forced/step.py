"""A recorded step compared with its forced replay: the error at each place of each layer, and what roundings make.

The replay is taken once in float64. Its differences from the record are the errors. It is taken some more times with
each result rounded. The differences of these samples from the first replay are the errors that a right step may have.
Some elements of a large tensor tell how large these errors are.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mpcompare.dtypes import HALF, dtype_name, torch_dtype
from mpcompare.instruments import heap
from mpcompare.precision import Precision
from mpcompare.tasks.cast import NORMS, stays_in_fp32
from mpcompare.verdict.examine.errors import gradient_errors
from mpcompare.verdict.examine.forced.call import Point, is_torchs
from mpcompare.verdict.examine.forced.digits import Ranges, digits_of
from mpcompare.verdict.examine.forced.earlier import EarlierSteps
from mpcompare.verdict.examine.forced.hooks import without_hooked
from mpcompare.verdict.examine.forced.known import KnownLayers
from mpcompare.verdict.examine.forced.places import FP32, Errors, Place, worst_calls
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError, OtherPathError
from mpcompare.verdict.examine.forced.record import OUTPUT, is_real
from mpcompare.verdict.examine.forced.replay import Recorded, Replay
from mpcompare.verdict.examine.forced.roundings import WHOLE, Roundings, in_operations
from mpcompare.verdict.judge.errors import GradientError, PlaceError, RoundingError
from mpcompare.verdict.judge.layers import Layers

SAMPLES, MOST = 4, 12  # samples of roundings: more than a few if roundings are a large part of a tensor


def compared_with_the_replay(recorded: Recorded, precision: Precision, earlier: EarlierSteps | None = None) -> Layers:
    """Returns the errors of a recorded step at all places of all layers, and of its gradients.

    Args:
        earlier: earlier steps. If one of them is like this step, its roundings replace samples; else this one is added.
    """
    recorded = replace(recorded, record=without_hooked(recorded.record, recorded.network))
    errors = Errors(len(recorded.batches))
    ranges, roundings = Ranges(precision, recorded.scale), Roundings(precision, recorded.scale)
    gradient, dtype = torch_dtype(precision.storage), torch.float32 if precision.is_16_bit else torch.float64

    gradients: dict[str, GradientError | None] = {}

    def compare_exact(point: Point, seen: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
        is_gradient = point.kind == "parameter"
        errors.compare(point, seen, exact, gradient if is_gradient else dtype)
        ranges.count(point, exact)
        if is_gradient:
            gradients.update(gradient_errors(recorded.grads, {point.layer: exact}))
        elif point.kind == "back":
            known.keep(point, exact)

    replay = recorded.new_replay(torch.float64, compare_exact)
    roundings.convolves_in = replay.convolves_in(gradient, replay.device)
    known = KnownLayers(recorded.network, recorded.record, dtype, ranges.results, errors.sample, roundings)
    replay.is_exact, replay.whose, replay.kept = True, ranges.whose, recorded.scale
    exact_loss = _run(replay, ranges, errors, recorded.buffers)
    places = {point: place for point, place in errors.places.items() if point.kind not in ("parameter", "back")}
    layers = Layers(
        loss=recorded.loss,
        exact_loss=recorded.loss if exact_loss is None else exact_loss,
        loss_noise=errors.loss_noise,
        gradients={name: gradients[name] for name in replay.sums.sources},
        detached=list(dict.fromkeys(replay.detached)),
        as_given=replay.as_given,
        factor=replay.factors[-1] / recorded.scale,
        formats=_other_formats(errors, replay, gradient),
        loss_is_replayed=exact_loss is not None,
    )
    if earlier is not None and (carried := earlier.carried(precision, layers, places)):
        return carried
    known.drop_sums(replay.sums.sources)
    noise = _take_samples(recorded, errors, roundings, known, gradient, layers.exact_loss)
    _sum_terms(recorded, errors, roundings, dtype, gradient)
    layers = replace(
        layers,
        loss_noise=max(errors.loss_noise, noise),
        places=worst_calls({point: _place(place, point, recorded) for point, place in places.items()}),
        rounding={name: _of_gradient(errors, replay, precision.unit_roundoff, name) for name in replay.sums.sources},
        digits=digits_of(replay, recorded.loss, errors.places, ranges) if precision.is_16_bit else {},
    )
    if earlier is not None:
        earlier.kept.append((precision, layers))
    return layers


def _run(replay: Replay, ranges: Ranges, errors: Errors, buffers: Mapping[str, Tensor]) -> float | None:
    """Runs the exact replay, compares the recorded buffers with the replay's buffers, and returns its loss. Raises
    NotReplayedError where a layer of the step is not called."""
    with ranges:
        loss = replay.run()
    if missed := replay.not_called():
        raise NotReplayedError(f"{missed[0]} is not called when the network is called again: it draws other numbers")
    for name, b in _statistics(replay):
        if name in buffers:
            errors.compare(Point("buffer", name), buffers[name], b, buffers[name].dtype)
    return loss


def _take_samples(
    recorded: Recorded, errors: Errors, roundings: Roundings, known: KnownLayers, storage: torch.dtype, loss: float
) -> float:
    """Finds how large roundings are at each point, by replays in which each result is rounded. A replay that sends rows
    to another expert is no sample. Returns the error that roundings make in the exact ``loss``: twice the standard
    deviation of the samples' losses, because few samples may be close by luck. It is 0 where nothing rounded is in it.

    Raises:
        OtherPathError: every replay sends rows to another expert.
    """
    heap.trim()  # the samples have tensors of the same sizes, and of other sizes than the exact replay
    taken, other, cancels_in, smallest = 0, None, roundings.cancels_in, roundings.smallest
    squares: list[float] = []
    short, wide = _norms_in_16_bits(recorded), _sums_in_fp32(recorded)

    def whose(part: str, layer: str) -> None:
        roundings.cancels_in = storage if layer in short else cancels_in
        # Within such a layer fp32 holds numbers that are too small for fp16, such as a variance.
        roundings.smallest = 0.0 if part and layer in wide else smallest

    for roundings.sample in range(MOST):
        if taken == SAMPLES and not errors.blind():
            break

        def compare(point: Point, _: Tensor, exact: Tensor, __: torch.dtype) -> None:
            errors.sample(roundings, point, exact)

        again = recorded.new_replay(known.dtype, compare, roundings.passing)
        # The first call of a checkpoint has no gradients. It is rounded as the second, or a repeated call is not found.
        again.operand, again.storage, again.whose = roundings.quantity, storage, whose
        again.summed, again.known, again.cast = roundings.round_, known, roundings.cast
        again.stored = lambda value: roundings.round_(value.clone())
        try:
            with roundings, in_operations(recorded.network):
                found = again.run()
        except OtherPathError as error:
            other = error
            continue
        taken += 1
        if again.loss_is_rounded and found is not None and math.isfinite(found):
            squares.append((found - loss) ** 2)
        for name, b in _statistics(again):
            errors.sample(roundings, Point("buffer", name), b)
    if not taken and other is not None:
        raise other
    return 2 * math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _norms_in_16_bits(recorded: Recorded) -> set[str]:
    """Returns the names of torch's own norms that had numbers of 16 bits alone. Torch keeps their statistics in 16
    bits, too, and the gradient that they pass down is a small rest of rounded terms."""
    found = set()
    for name, calls in recorded.record.calls.items():
        module = recorded.network.get_submodule(name) if name != OUTPUT else None
        formats = [{*c.held.values(), *(v.dtype for v in (*c.inputs, *c.outputs) if is_real(v))} for c in calls]
        if isinstance(module, NORMS) and is_torchs(module) and all(kinds <= set(HALF) for kinds in formats):
            found.add(name)
    return found


def _sums_in_fp32(recorded: Recorded) -> set[str]:
    """Returns the names of the norms and embeddings that were given numbers of fp32 alone."""
    found = set()
    for name, calls in recorded.record.calls.items():
        given = {d for c in calls for d in (*c.held.values(), *(v.dtype for v in c.inputs if is_real(v)))}
        if name != OUTPUT and given == {torch.float32} and stays_in_fp32(recorded.network.get_submodule(name)):
            found.add(name)
    return found


def _sum_terms(
    recorded: Recorded, errors: Errors, roundings: Roundings, dtype: torch.dtype, storage: torch.dtype
) -> None:
    """Finds the size of what is summed at each point, by a replay in which each operand is rounded. It is the first
    replay that sends no rows to another expert.

    Raises:
        OtherPathError: every replay sends rows to another expert.
    """
    u, first = roundings.u, roundings.sample

    def rounded(operand: Tensor) -> Tensor:
        return roundings.round_(operand.clone()) if operand.dtype in WHOLE else operand

    for roundings.sample in range(first, first + MOST):
        terms = recorded.new_replay(dtype, lambda point, _, exact, __: errors.summed(point, exact, u))
        terms.operand = terms.stored = rounded
        terms.storage, terms.stores_all = storage, True
        try:
            terms.run()
            break
        except OtherPathError as error:
            other = error
    else:
        raise other
    errors.loss_noise = max(errors.loss_noise, 4 * FP32 * math.sqrt(terms.squares))  # and numbers above the network
    for name, b in _statistics(terms):
        errors.summed(Point("buffer", name), b, u)


def _statistics(replay: Replay) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers of real numbers as a replay leaves them, such as the running statistics of norms."""
    yield from ((name, b) for name, b in replay.network.named_buffers() if b.is_floating_point())


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
        error = max(rounding.error, u / math.sqrt(3) * rounding.terms)
        return replace(rounding, error=error, along=max(rounding.along or 0.0, error / math.sqrt(rounding.dimensions)))
    if name not in replay.in_fp32 or len(replay.sums.sources[name]) > 1:
        return rounding
    part = min(FP32 / u * math.sqrt(replay.in_fp32[name]), 1.0)
    return replace(rounding, error=part * rounding.error, along=part * (rounding.along or 0.0), zeros=0.0)


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
    return PlaceError(place.error, place.norm, made, rounding.dimensions, rounding.samples, rounding.terms)
