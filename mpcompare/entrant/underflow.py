"""What a format loses of a step: which part of the gradients is 0, subnormal, inf or NaN; which updates are lost."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpcompare.tasks.task import Params


def gradient_shares(grads: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> dict[str, float]:
    """Which part of all elements is what, as the format sees them that a step computes in.

    A backend shows its gradients unscaled and in fp32. What underflows are the scaled ones, so these are looked at: for
    a scale that is a power of 2 they are, bit for bit, what a backward in 16 bits has made.

    Args:
        grads: unscaled, fp32, inf and NaN included; any number of elements, but not none.
        scale: what they were multiplied by when they were computed: the loss scale.
        dtype: that the step computes in: fp16, bf16 or fp32. fp16 is subnormal below 2^-14, the others below 2^-126.

    Returns:
        ``grad_zero``, exactly 0, for whatever reason: too small for the format, or a unit that relu turned off;
        ``grad_subnormal``, not 0 and held with fewer digits than the others; ``grad_nonfinite``, inf or NaN.
    """
    limits = torch.finfo(dtype)
    # Between the largest subnormal number and the smallest normal one: a scale that is no power of 2 was rounded.
    smallest = limits.smallest_normal * (1 - limits.eps / 2)
    counts = torch.zeros(3, dtype=torch.int64, device=next(iter(grads.values())).device)
    for g in grads.values():
        size = g.abs() * scale
        zero = g == 0
        counts += torch.stack([zero.sum(), ((size < smallest) & ~zero).sum(), (~g.isfinite()).sum()])
    elements = sum(g.numel() for g in grads.values())
    names = ("grad_zero", "grad_subnormal", "grad_nonfinite")
    return dict(zip(names, (counts.double() / elements).tolist(), strict=True))


def moving(nonzero: Params, remembered: Mapping[str, Params], weights: Params, decay: float) -> Params:
    """Which elements an update has to change, as bool tensors: those with a gradient, a momentum or a decay.

    That the three cancel each other to exactly 0 is not looked for.

    Args:
        nonzero: where the gradients are not 0.
        remembered: ``State["optimizer"]`` after the update: ``momentum_buffer`` or ``exp_avg`` are the means of the
            gradients that it is made of.
        weights: before the update.
        decay: the optimizer's ``weight_decay``.
    """
    found = {}
    for name, moves in nonzero.items():
        for kind in ("momentum_buffer", "exp_avg"):
            if name in remembered.get(kind, {}):
                moves = moves | (remembered[kind][name] != 0)
        found[name] = moves | (weights[name] != 0) if decay else moves
    return found


def lost_share(before: Params, after: Params, moves: Params) -> float | None:
    """Which part of the elements that an update ``moves`` is the same bits as ``before``: half the gap to the next
    number is more than their update, ``w + dw == w``. None where nothing moves."""
    moved = sum(int(mask.sum()) for mask in moves.values())
    lost = sum(int(((after[name] == before[name]) & mask).sum()) for name, mask in moves.items())
    return lost / moved if moved else None
