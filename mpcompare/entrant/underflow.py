"""The share of a step that its number format loses: gradients that are 0, subnormal, inf or NaN, and lost updates."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpcompare.precision import Format
from mpcompare.tasks.task import Params


def gradient_shares(grads: Mapping[str, Tensor], scale: float, format: Format) -> dict[str, float]:
    """Returns the shares of all gradient elements that are zero, subnormal and not finite in the format of the step.

    A backend shows its gradients unscaled and in fp32. The scaled ones underflow, so these are counted: for a scale
    that is a power of 2 they are, bit for bit, those that a backward in 16 bits has made.

    Args:
        grads: unscaled, fp32, inf and NaN included; any number of elements, but not none.
        scale: the factor with which they were computed: the loss scale.
        format: the one in which the step stores its gradients; fp16 is subnormal below 2^-14, the others below 2^-126.

    Returns:
        ``grad_zero``, exactly 0 for whatever reason: too small for the format, or a unit that relu turned off;
        ``grad_subnormal``, not 0 and held with fewer digits than the others; ``grad_nonfinite``, inf or NaN.
    """
    # Between the largest subnormal number and the smallest normal one: a scale that is no power of 2 was rounded.
    smallest = format.smallest_normal * (1 - format.unit_roundoff)
    counts = torch.zeros(3, dtype=torch.int64, device=next(iter(grads.values())).device)
    for g in grads.values():
        size = g.abs() * scale
        zero = g == 0
        counts += torch.stack([zero.sum(), ((size < smallest) & ~zero).sum(), (~g.isfinite()).sum()])
    elements = sum(g.numel() for g in grads.values())
    names = ("grad_zero", "grad_subnormal", "grad_nonfinite")
    return dict(zip(names, (counts.double() / elements).tolist(), strict=True))


def moving(nonzero: Params, remembered: Mapping[str, Params], weights: Params, decay: float) -> Params:
    """Returns masks of the elements that an update has to change: those with a gradient, a momentum or a decay.

    An element where the three cancel each other to exactly 0 counts as one that has to change.

    Args:
        nonzero: bool masks of the gradients that are not 0.
        remembered: ``State["optimizer"]`` after the update: ``momentum_buffer`` or ``exp_avg`` are the means of the
            gradients of which the update is made.
        weights: before the update.
        decay: the optimizer's ``weight_decay``.
    """
    masks = {}
    for name, moves in nonzero.items():
        for kind in ("momentum_buffer", "exp_avg"):
            if name in remembered.get(kind, {}):
                moves = moves | (remembered[kind][name] != 0)
        masks[name] = moves | (weights[name] != 0) if decay else moves
    return masks


def lost_share(before: Params, after: Params, moves: Params) -> float | None:
    """Returns the share of the elements in ``moves`` whose update is lost: ``w + dw == w``, bit for bit.

    The update of such an element is less than half the gap to the next number. None where no element has to move.
    """
    moved = sum(int(mask.sum()) for mask in moves.values())
    lost = sum(int(((after[name] == before[name]) & mask).sum()) for name, mask in moves.items())
    return lost / moved if moved else None
