"""Numbers that say how exact a computation was. Judges nothing: report/verdict.py does, from what a run wrote down."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpcompare.tasks.mlp import Params

UNIT_ROUNDOFF = 2.0**-24  # of fp32: rounding changes a number by at most this, relatively


def gradient_errors(grads: Mapping[str, Tensor], exact: Params) -> dict[str, dict[str, Any]]:
    """How far each gradient is from the float64 ``exact``, with what tells why.

    Returns:
        By tensor: ``error`` ``||g - exact||`` and ``norm`` ``||exact||`` (Frobenius), ``largest`` ``max |exact|``;
        ``slope``, the number that times ``exact`` is closest to g, and ``residual``, the error that is left then;
        ``zeros``, which part of the ``elements`` that should not be 0 is; ``transposed``, the error of g^T, if g is
        square. Empty where the gradient is missing.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, true in exact.items():
        found[name] = {}
        if name not in grads:
            continue
        g, norm = grads[name].double(), true.norm().item()
        slope = (g * true).sum().item() / norm**2 if norm else 1.0
        nonzero = true != 0
        found[name] = {
            "error": (g - true).norm().item(),
            "norm": norm,
            "largest": true.abs().max().item(),
            "slope": slope,
            "residual": (g - slope * true).norm().item(),
            "zeros": ((g == 0) & nonzero).sum().item() / max(int(nonzero.sum()), 1),
            "elements": int(nonzero.sum()),
        }
        if g.dim() == 2 and g.shape[0] == g.shape[1] > 1:
            found[name]["transposed"] = (g.t() - true).norm().item()
    return found


def relative_error(e: Mapping[str, Any]) -> float:
    """``||g - exact|| / ||exact||`` from :func:`gradient_errors`; inf where g is missing or holds no number."""
    if not e or (not e["norm"] and e["error"]):
        return math.inf
    relative = e["error"] / e["norm"] if e["norm"] else 0.0
    return relative if math.isfinite(relative) else math.inf


class Optimizer:
    """Replays SGD in float64 on the gradients that a backend says it has: ``v = momentum v + g; w = w - lr v``."""

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.velocity: Params = {}
        self.magnitude: Params = {}  # the same sums of absolute values: what rounding errors are relative to

    def errors(
        self, before: Params, after: Params, grads: Mapping[str, Tensor], compute_dtype: torch.dtype
    ) -> dict[str, dict[str, float]]:
        """How far the update ``before -> after`` is from what fp32 arithmetic allows.

        Returns:
            By tensor: ``excess``, the largest error over its bound; ``slope``, the update over the right one;
            ``lost``, which part of the elements that should have moved did not, and ``lost_in_fp32``, which part fp32
            rounds away; ``short``, which part of the new elements has no more digits than ``compute_dtype``.
        """
        found = {}
        for name, g in grads.items():
            old, new = before[name].double(), after[name].double()
            zero = torch.zeros_like(old)
            self.velocity[name] = self.momentum * self.velocity.get(name, zero) + g.double()
            self.magnitude[name] = self.momentum * self.magnitude.get(name, zero) + g.double().abs()
            step = -self.lr * self.velocity[name]
            # One rounding of w, and of v and lr v a few each step, fused or not: u |w| + 8 u lr (|g| + momentum ...).
            bound = UNIT_ROUNDOFF * ((old + step).abs() + 8 * self.lr * self.magnitude[name]) + 2.0**-149
            norm, moves = step.square().sum().item(), (step != 0).sum().item()
            found[name] = {
                "excess": ((new - old - step).abs() / bound).max().item(),
                "slope": ((new - old) * step).sum().item() / norm if norm else 1.0,
                "lost": ((new == old) & (step != 0)).sum().item() / max(moves, 1),
                "lost_in_fp32": (((old + step).float() == before[name]) & (step != 0)).sum().item() / max(moves, 1),
                "short": (after[name].to(compute_dtype).float() == after[name]).double().mean().item(),
            }
        return found


LOWEST, HIGHEST = -60, 20  # exponents that are told apart: fp16 ends at -24 and 15


def exponents(values: Tensor) -> Tensor:
    """How many of the values are 0, and how many lie in ``[2^e, 2^(e+1))`` for e from LOWEST to HIGHEST: int64
    ``[1 + HIGHEST - LOWEST + 1]``. What is smaller or larger counts to the last at that end."""
    _, exponent = torch.frexp(values.detach().flatten())  # |value| in [2^(exponent-1), 2^exponent)
    place = (exponent - 1).clamp_(LOWEST, HIGHEST) - LOWEST + 1
    return torch.bincount(place.where(values.flatten() != 0, 0), minlength=HIGHEST - LOWEST + 2)


SKETCH = 256


def sketch(params: Params) -> dict[str, list[float]]:
    """SKETCH numbers for each tensor, so that ``||sketch(a) - sketch(b)||`` is ``||a - b||`` within about 5 %.

    Each element is added to a random one of the numbers with a random sign, the same ones in every run (the count
    sketch of Charikar, Chen and Farach-Colton, ICALP 2002): runs can be compared long after their weights are gone.
    """
    found = {}
    for name, p in params.items():
        values = p.detach().cpu().double().flatten()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        place = torch.randint(2 * SKETCH, values.shape, generator=generator)
        sums = torch.zeros(2 * SKETCH, dtype=torch.float64).index_add_(0, place, values)
        found[name] = (sums[:SKETCH] - sums[SKETCH:]).tolist()  # the upper half are the negative signs
    return found
