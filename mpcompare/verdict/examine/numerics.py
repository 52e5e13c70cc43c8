"""Numbers that say how exact a computation was. Judges nothing: report/verdict.py does, from what a run wrote down."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcompare.tasks.optimizers import Replay
from mpcompare.tasks.task import Params
from mpcompare.verdict.reading import HIGHEST, LOWEST, factor_of_norm

UNIT_ROUNDOFF = 2.0**-24  # of fp32: rounding changes a number by at most this, relatively


CHUNK = 1 << 18  # elements at a time: float64 copies of so many stay in the cache


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors side by side, piece by piece.

    One alone comes row by row. Several come column by column where the first of them lies so in memory, as the weights
    of a backend that keeps them transposed: what is asked of single elements does not depend on their order.
    """
    if len(tensors) > 1 and tensors[0].dim() == 2 and tensors[0].t().is_contiguous():
        tensors = tuple(t.t() for t in tensors)
    return zip(*(t.reshape(-1).split(CHUNK) for t in tensors), strict=True)


def gradient_errors(grads: Mapping[str, Tensor], exact: Params) -> dict[str, dict[str, Any]]:
    """How far each gradient is from the float64 ``exact``, with what tells why.

    Returns:
        By tensor: ``error`` ``||g - exact||`` and ``norm`` ``||exact||`` (Frobenius), ``largest`` ``max |exact|``;
        ``slope``, the number that times ``exact`` is closest to g, and ``residual``, the error that is left then;
        ``zeros``, which part of the ``elements`` that should not be 0 is; ``transposed``, the error of g^T, if g is
        square and far off. Empty where the gradient is missing.
    """
    return {name: _gradient_errors(grads[name], true) if name in grads else {} for name, true in exact.items()}


def _gradient_errors(grad: Tensor, exact: Tensor) -> dict[str, Any]:
    product = norm2 = error2 = largest = 0.0
    zeros = nonzeros = 0
    for g, true in chunks(grad, exact):
        g, true = g.double(), true.double()
        nonzero = true != 0
        product += torch.dot(g, true).item()
        norm2 += torch.dot(true, true).item()
        error2 += (g - true).square().sum().item()
        largest = max(largest, true.abs().max().item())
        zeros += int(((g == 0) & nonzero).sum())
        nonzeros += int(nonzero.sum())
    slope = product / norm2 if norm2 else 1.0
    found = {
        "error": math.sqrt(error2),
        "norm": math.sqrt(norm2),
        "largest": largest,
        "slope": slope,
        # g = slope exact + r with r orthogonal to exact, so ||g - exact||^2 = (slope - 1)^2 ||exact||^2 + ||r||^2.
        "residual": math.sqrt(max(error2 - (slope - 1) ** 2 * norm2, 0.0)) if math.isfinite(error2) else error2,
        "zeros": zeros / max(nonzeros, 1),
        "elements": nonzeros,
    }
    if grad.dim() == 2 and grad.shape[0] == grad.shape[1] > 1 and 100 * error2 > norm2:
        found["transposed"] = (grad.t().double() - exact).norm().item()
    return found


def update_errors(
    replay: Replay,
    before: Params,
    after: Params,
    grads: Mapping[str, Tensor],
    lr: float,
    compute_dtype: torch.dtype,
) -> dict[str, dict[str, float]]:
    """How far the change ``before -> after`` is from what fp32 arithmetic makes of the gradients that a backend shows.

    Args:
        replay: the optimizer in float64, which takes its next step.
        lr: learning rate of that step.

    Returns:
        By tensor: ``excess``, the largest error over its bound; ``slope``, the change over the right one;
        ``lost``, which part of the elements that should have moved did not, and ``lost_in_fp32``, which part fp32
        rounds away; ``short``, which part of the new elements has no more digits than ``compute_dtype``.
    """
    return {
        name: _update_errors(partial(replay.step, lr=lr), name, before[name], after[name], g, compute_dtype)
        for name, g in grads.items()
    }


def _update_errors(
    step: Callable[..., tuple[Tensor, Tensor]],
    name: str,
    before: Tensor,
    after: Tensor,
    grad: Tensor,
    compute_dtype: torch.dtype,
) -> dict[str, float]:
    excess = product = norm2 = 0.0
    moves = lost = lost_in_fp32 = short = 0
    for number, (w, new, g) in enumerate(chunks(before, after, grad)):
        w, new = w.double(), new.double()
        # An optimizer works element by element, so that a chunk is to its replay a tensor of its own.
        s, m = step(f"{name} {number}", g.double(), w)
        change, right = new - w, w + s
        excess = max(excess, update_error(w, new, s, m))
        product += torch.dot(change, s).item()
        norm2 += torch.dot(s, s).item()
        moving = s != 0
        moves += int(moving.sum())
        lost += int(((change == 0) & moving).sum())
        lost_in_fp32 += int(((right.float() == w) & moving).sum())
        short += int((new.to(compute_dtype).float() == new).sum())
    return {
        "excess": excess,
        "slope": product / norm2 if norm2 else 1.0,
        "lost": lost / max(moves, 1),
        "lost_in_fp32": lost_in_fp32 / max(moves, 1),
        "short": short / max(before.numel(), 1),
    }


def update_error(before: Tensor, after: Tensor, step: Tensor, magnitude: Tensor) -> float:
    """The largest error of a change over its bound: one rounding of the new weight, and those of its change.

    Args:
        step, magnitude: as ``Replay.step`` returns them.
    """
    before, after = before.double(), after.double()
    bound = (before + step).abs_().add_(magnitude).mul_(UNIT_ROUNDOFF).add_(2.0**-149)
    return _largest((after - before).sub_(step).abs_().div_(bound))


def clip_factor(grads: Mapping[str, Tensor], clip_norm: float | None, norm_type: float) -> float:
    """What clipping multiplies the gradients by, from the norm of all of them as one vector, in float64."""
    return 1.0 if clip_norm is None else factor_of_norm(total_norm(grads, norm_type), clip_norm)


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are of one dtype and shape and equal bit for bit, on whatever device each is."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    whole = INTEGERS[a.element_size()]
    return torch.equal(a.detach().view(whole), b.detach().to(a.device).view(whole))


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The norm of ``a - b``, of all tensors as one vector, in float64."""
    squares = ((x.double() - y.double()).square_().sum().item() for name in a for x, y in chunks(a[name], b[name]))
    return math.sqrt(sum(squares))


def total_norm(grads: Mapping[str, Tensor], norm_type: float) -> float:
    """Of all gradients as one vector, in float64: the root of the sum of squares, or the largest element (inf)."""
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in grads.values()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type).item()


def clip_errors(
    grads: Mapping[str, Tensor] | None, clipped: Mapping[str, Tensor], norm: float, clip_norm: float, norm_type: float
) -> dict[str, Any]:
    """What clipping made of the gradients.

    Args:
        grads: before; None where they cannot be seen.
        clipped: after.
        norm: as the backend says.

    Returns:
        ``norm``, and ``norm_after``, that of the clipped gradients; ``clip_norm``, ``norm_type``, and how many
        ``elements`` there are; and, where the gradients before can
        be seen, ``should_norm``, theirs, ``should_factor``, what they should be multiplied by, and by tensor in
        ``factors`` what they were: ``factor``; ``rest``, what is left of the tensor then, over its ``norm`` before.
    """
    found: dict[str, Any] = {"norm": norm, "norm_after": total_norm(clipped, norm_type), "clip_norm": clip_norm}
    found |= {"norm_type": norm_type, "elements": sum(g.numel() for g in clipped.values())}
    if grads is None:
        return found
    factors = {}
    for name, g in grads.items():
        before, after = g.double().flatten(), clipped[name].double().flatten()
        square = torch.dot(before, before).item()
        if square:
            slope = torch.dot(before, after).item() / square
            rest = (after - slope * before).norm().item() / math.sqrt(square)
            factors[name] = {"factor": slope, "rest": rest, "norm": math.sqrt(square)}
    should = clip_factor(grads, clip_norm, norm_type)
    return {**found, "should_norm": total_norm(grads, norm_type), "should_factor": should, "factors": factors}


def shares_of(grads: Mapping[str, Tensor], shares: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """How often each micro-batch counts in the gradients: by least squares on their sketches, which are linear.

    Args:
        shares: ``Exact.shares``: each is right if it counts once.

    Returns:
        ``counts``, one number for each; ``rest``, the norm of what they leave over of the gradients, within 5 %; and
        ``smallest`` singular value of the shares: an error e of the gradients is one of at most ``e / smallest`` in
        the counts.
    """
    names = [name for name in shares[0] if name in grads]
    short = sketch({name: grads[name] for name in names})
    target = torch.tensor([short[name] for name in names], dtype=torch.float64).flatten()
    columns = [torch.tensor([share[name] for name in names], dtype=torch.float64).flatten() for share in shares]
    matrix = torch.stack(columns, dim=1)
    counts = torch.linalg.lstsq(matrix, target[:, None]).solution[:, 0]
    rest, smallest = (target - matrix @ counts).norm().item(), torch.linalg.svdvals(matrix)[-1].item()
    return {"counts": counts.tolist(), "rest": rest, "smallest": smallest}


def _largest(values: Tensor) -> float:
    """inf where there is a NaN: ``max`` of Python's would pass over it."""
    largest = values.max().item()
    return math.inf if math.isnan(largest) else largest


def exponents(values: Tensor) -> Tensor:
    """How many of the values are 0, and how many lie in ``[2^e, 2^(e+1))`` for e from LOWEST to HIGHEST: int64
    ``[1 + HIGHEST - LOWEST + 1]``. What is smaller or larger counts to the last at that end."""
    count = torch.zeros(HIGHEST - LOWEST + 2, dtype=torch.int64)
    for (part,) in chunks(values.detach()):
        _, exponent = torch.frexp(part)  # |value| in [2^(exponent-1), 2^exponent)
        place = exponent.sub_(1).clamp_(LOWEST, HIGHEST).sub_(LOWEST - 1)
        count += torch.bincount(place.masked_fill_(part == 0, 0), minlength=len(count)).cpu()
    return count


SKETCH = 256


def sketch(params: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """SKETCH numbers for each tensor, so that ``||sketch(a) - sketch(b)||`` is ``||a - b||`` within about 5 %.

    Each element is added to a random one of the numbers with a random sign, the same ones in every run (the count
    sketch of Charikar, Chen and Farach-Colton, ICALP 2002): runs can be compared long after their weights are gone.
    """
    found = {}
    for name, p in params.items():
        sums = torch.zeros(2 * SKETCH, dtype=torch.float64)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        for (values,) in chunks(p.detach()):
            place = torch.randint(2 * SKETCH, values.shape, generator=generator)
            sums.index_add_(0, place, values.cpu().double())
        found[name] = (sums[:SKETCH] - sums[SKETCH:]).tolist()  # the upper half are the negative signs
    return found
