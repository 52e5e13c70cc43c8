"""Errors of gradients, updates and clipped gradients, compared with exact ones, and what tells their reason."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpcompare.clipping import factor_of_norm
from mpcompare.tasks.optimizers import UpdateReplay
from mpcompare.verdict.examine.numerics import SKETCH, chunks, distance, spread, total_norm
from mpcompare.verdict.examine.seen import Seen, by
from mpcompare.verdict.judge.accumulation import MicroBatches
from mpcompare.verdict.judge.drive import Clip, ClipFactor, UpdateError
from mpcompare.verdict.judge.errors import Errors, GradientError

UNIT_ROUNDOFF = 2.0**-24  # of fp32: rounding changes a number by at most this, relatively
DIGITS = 8  # the number of digits of bf16
HALF = 0.45  # of a gap: nearer to the middle, an error of the exact number could decide to which side it is rounded


def gradient_errors(grads: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Errors:
    """Returns the error of each gradient, or buffer, compared with the ``exact`` one; None where it is missing."""
    return {name: gradient_error(grads[name], true) if name in grads else None for name, true in exact.items()}


def gradient_error(grad: Tensor, exact: Tensor) -> GradientError:
    """Returns the error of one gradient, any shape and dtype, compared with ``exact``, of the same shape."""
    product = norm2 = error2 = largest = 0.0
    zeros = nonzeros = 0
    for g, true in chunks(grad, exact):
        g, true = g.double(), true.double()
        apart = g - true
        product += torch.dot(g, true).item()
        norm2 += torch.dot(true, true).item()
        error2 += torch.dot(apart, apart).item()
        largest = max(largest, *(abs(end.item()) for end in true.aminmax()))
        is_there = true.bool()
        nonzeros += int(is_there.count_nonzero())
        zeros += int((is_there & ~g.bool()).count_nonzero())
    slope = product / norm2 if norm2 else 1.0
    transposed = None
    if grad.dim() == 2 and grad.shape[0] == grad.shape[1] > 1 and 100 * error2 > norm2:
        transposed = distance({"": grad.t()}, {"": exact})
    return GradientError(
        error=math.sqrt(error2),
        norm=math.sqrt(norm2),
        largest=largest,
        slope=slope,
        # g = slope exact + r with r orthogonal to exact, so ||g - exact||^2 = (slope - 1)^2 ||exact||^2 + ||r||^2.
        residual=math.sqrt(max(error2 - (slope - 1) ** 2 * norm2, 0.0)) if math.isfinite(error2) else error2,
        zeros=zeros / max(nonzeros, 1),
        elements=nonzeros,
        transposed=transposed,
    )


def update_errors(
    replay: UpdateReplay, seen: Seen, short_dtype: torch.dtype, coarse: float = 1.0
) -> dict[str, UpdateError]:
    """Returns how far an update is from what fp32 arithmetic makes of the gradients that a backend shows.

    Args:
        replay: the optimizer in float64, which takes its next step.
        short_dtype: the format in which the backend computes; weights that have no more digits count as ``short``.
        coarse: the largest rounding of a new weight, in units of its largest rounding in fp32.
    """
    return {name: _update_error(replay, name, seen, short_dtype, coarse) for name in seen.clipped}


def _update_error(replay: UpdateReplay, name: str, seen: Seen, short_dtype: torch.dtype, coarse: float) -> UpdateError:
    stored, after = seen.before[name], seen.after[name]
    w, new = stored.double(), after.double()
    s, magnitude = by(replay)(name, seen)
    changed, moved, is_moved = new - w, w + s, s != 0
    lost = (changed == 0) & is_moved
    lost_in_fp32 = (moved.float().sub_(stored) == 0) & is_moved
    left = lost & (moved.to(short_dtype).double() != w)
    moves, norm2 = max(int(is_moved.sum()), 1), s.square().sum().item()
    far, should_far = far_from(moved, new) if coarse > 1 else (0, 0.0)
    longer = (after.to(short_dtype) - after).bool()
    return UpdateError(
        excess=update_error(w, new, s, magnitude, coarse=coarse),
        slope=(changed * s).sum().item() / norm2 if norm2 else 1.0,
        lost=int(lost.sum()) / moves,
        lost_in_fp32=int(lost_in_fp32.sum()) / moves,
        short=int((~longer).sum()) / max(after.numel(), 1),
        left=int(left.sum()) / moves,
        far=far,
        should_far=should_far,
    )


def update_error(before: Tensor, after: Tensor, step: Tensor, magnitude: Tensor, *, coarse: float = 1.0) -> float:
    """Returns the largest error of a change over its bound: one rounding of the new weight, and the roundings of its
    change, a ``step`` and its ``magnitude`` as ``Replay.step`` returns them. The largest rounding of the new weight is
    ``coarse``, in units of its largest rounding in fp32."""
    before, after = before.double(), after.double()
    bound = (before + step).abs_()
    bound = (bound if coarse == 1 else bound.mul_(coarse)).add_(magnitude).mul_(UNIT_ROUNDOFF).add_(2.0**-149)
    return largest((after - before).sub_(step).abs_().div_(bound))


def far_from(exact: Tensor, new: Tensor) -> tuple[int, float]:
    """Returns how many elements of ``new`` went to the farther of their two neighbours in bf16: they are more than half
    a gap from ``exact``. And returns how many do so on average if rounding is at random. A number then goes to the
    farther neighbour with a probability that is its distance from the nearer one, in gaps. Both are float64. Numbers
    halfway between two neighbours are left out."""
    gap = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - DIGITS)
    nearer = (exact - exact.div(gap).round_().mul_(gap)).abs_().div_(gap)
    counts = nearer < HALF
    far = counts & ((new - exact).abs_() > gap / 2)
    return int(far.sum()), float(nearer[counts].sum())


def clip_errors(
    grads: Mapping[str, Tensor] | None, clipped: Mapping[str, Tensor], norm: float, clip_norm: float, norm_type: float
) -> Clip:
    """Returns what clipping made of the gradients: their norms, and the factors of some elements of each.

    Args:
        grads: the gradients before; None where they cannot be seen.
        clipped: the gradients after.
        norm: the norm, as the backend says.
    """
    after, elements = total_norm(clipped, norm_type), sum(g.numel() for g in clipped.values())
    if grads is None:
        return Clip(norm, after, clip_norm, norm_type, elements)
    factors = {}
    for name, g in grads.items():
        before, changed = spread(g).double(), spread(clipped[name]).double()
        square = torch.dot(before, before).item()
        if square:
            slope = torch.dot(before, changed).item() / square
            rest = (changed - slope * before).norm().item() / math.sqrt(square)
            factors[name] = ClipFactor(slope, rest, total_norm({name: g}, 2.0))
    should_norm = total_norm(grads, norm_type)
    should_factor = factor_of_norm(should_norm, clip_norm)
    return Clip(norm, after, clip_norm, norm_type, elements, should_norm, should_factor, factors)


def micro_batches(
    grads: Mapping[str, Sequence[float]], shares: Sequence[Mapping[str, Sequence[float]]], weights: Sequence[float] = ()
) -> MicroBatches:
    """Returns how often each micro-batch counts in the gradients: by least squares on sketches, which are linear.

    Args:
        grads: as ``numerics.sketch``.
        shares: ``Exact.shares``; the gradients are right if each share counts once.
        weights: ``Exact.weights``.
    """
    names = [name for name in dict.fromkeys(name for share in shares for name in share) if name in grads]
    none = [0.0] * SKETCH  # the sketch of a parameter on which a micro-batch does not depend
    target = torch.tensor([grads[name] for name in names], dtype=torch.float64).flatten()
    columns = [
        torch.tensor([share.get(name, none) for name in names], dtype=torch.float64).flatten() for share in shares
    ]
    matrix = torch.stack(columns, dim=1)
    counts = torch.linalg.lstsq(matrix, target[:, None]).solution[:, 0]
    rest, smallest = (target - matrix @ counts).norm().item(), torch.linalg.svdvals(matrix)[-1].item()
    return MicroBatches(counts.tolist(), rest, smallest, list(weights))


def largest(values: Tensor) -> float:
    """Returns the largest value, 0 of none; inf where there is a NaN: ``max`` of Python's would pass over it."""
    value = values.max().item() if values.numel() else 0.0
    return math.inf if math.isnan(value) else value
