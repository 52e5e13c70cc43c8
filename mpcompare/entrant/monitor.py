"""A closer look into single steps: the norm of the gradients, the shares of gradients that are 0, subnormal, inf or NaN
in their format, and the share of updates that are lost."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpcompare.clipping import factor_of_norm
from mpcompare.contract import Batches, Stepper
from mpcompare.instruments.clock import Clock
from mpcompare.precision import Format
from mpcompare.tasks.groups import in_group
from mpcompare.tasks.task import Params, Task
from mpcompare.verdict.examine.numerics import total_norm


@dataclass(frozen=True)
class Monitor:
    """Takes the steps that are monitored. Each step is bit for bit as without a monitor.

    The clock does not run while it looks: a step by phases is timed up to ``unscale()`` and again from ``clip()`` on, a
    step in one piece before it is looked at. Looking slows ``step_ms`` all the same: caches are cold afterwards, and a
    GPU that was waited for has nothing queued. A copy of the parameters, and a byte for each number, live meanwhile.
    """

    task: Task
    format: Format  # the format in which a step stores its gradients (:func:`gradient_shares`)
    clock: Clock

    def step(self, stepper: Stepper, batches: Batches) -> tuple[Tensor, dict[str, Any], int]:
        """Takes the stepper's next step.

        Returns:
            The loss; the shares by the names of ``records.MONITORED``, as far as the backend shows its gradients, with
            ``grad_norm`` where the task does not clip; and the number of pieces into which the clock has cut the step.
        """
        backend, clock = stepper.backend, self.clock
        before = {name: p.clone() for name, p in backend.master_params().items()}
        scale = float(backend.loss_scale())
        clock.mark()
        walk = stepper.walk(batches)
        walk.through("unscale")
        clock.mark()
        whole = walk.in_one_piece
        grads: Params = backend.grads()
        nonzero = {name: g != 0 for name, g in grads.items()}
        unclipped = self._unclipped(backend.grad_norm) if whole else 1.0
        shares: dict[str, Any] = {}
        if grads and unclipped:
            shares = gradient_shares(grads, scale / unclipped, self.format)
        if grads and self.task.clip_norm is None:
            shares["grad_norm"] = total_norm(grads, 2.0)
        del grads
        if not whole:
            clock.mark()
            walk.finish()
            clock.mark()
        if nonzero and not bool(backend.skipped):
            owns = {name: in_group(self.task.optimizer, name, w.dim())[0] for name, w in before.items()}
            decayed = [name for name, own in owns.items() if getattr(own, "weight_decay", 0.0)]
            moves = moving(nonzero, backend.state_dict()["optimizer"], before, decayed)
            shares["lost_updates"] = lost_share(before, backend.master_params(), moves)
        return walk.loss, shares, 1 if whole else 2

    def _unclipped(self, norm: float | Tensor | None) -> float:
        """Returns the factor by which clipping has multiplied the gradients; 0 if it made all of them inf or NaN."""
        if self.task.clip_norm is None or norm is None:
            return 1.0
        norm = float(norm)
        return factor_of_norm(norm, self.task.clip_norm) if math.isfinite(norm) else 0.0


def gradient_shares(grads: Mapping[str, Tensor], scale: float, format: Format) -> dict[str, float]:
    """Returns the shares of all gradient elements that are zero, subnormal and not finite in the format of the step.

    A backend shows its gradients unscaled and in fp32. The scaled gradients underflow, so these are counted: if the
    scale is a power of 2 they are, bit for bit, the gradients that a backward in 16 bits has made.

    Args:
        grads: unscaled, fp32, inf and NaN included; any number of elements, at least one.
        scale: the factor with which they were computed: the loss scale.
        format: the format in which the step stores its gradients. Numbers are subnormal below 2^-14 in fp16, and below
            2^-126 in other formats.

    Returns:
        ``grad_zero``, exactly 0 for any reason: too small for the format, or a unit that relu turned off;
        ``grad_subnormal``, not 0 and held with fewer digits than normal numbers; ``grad_nonfinite``, inf or NaN.
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


def moving(nonzero: Params, remembered: Mapping[str, Params], weights: Params, decayed: Collection[str]) -> Params:
    """Returns masks of the elements that an update has to change: elements with a gradient, a momentum or a decay.

    An element has to change even if the three cancel each other to exactly 0.

    Args:
        nonzero: bool masks of the gradients that are not 0.
        remembered: ``State["optimizer"]`` after the update: ``momentum_buffer`` or ``exp_avg`` are the means of the
            gradients that the update is made of.
        weights: the weights before the update.
        decayed: the weights that have a ``weight_decay``; a parameter group may have one of its own.
    """
    masks = {}
    for name, moves in nonzero.items():
        for kind in ("momentum_buffer", "exp_avg"):
            if name in remembered.get(kind, {}):
                moves = moves | (remembered[kind][name] != 0)
        masks[name] = moves | (weights[name] != 0) if name in decayed else moves
    return masks


def lost_share(before: Params, after: Params, moves: Params) -> float | None:
    """Returns the share of the elements in ``moves`` whose update is lost: ``w + dw == w``, bit for bit.

    The update of such an element is less than half the gap to the next number. None where no element has to move.
    """
    moved = sum(int(mask.sum()) for mask in moves.values())
    lost = sum(int(((after[name] == before[name]) & mask).sum()) for name, mask in moves.items())
    return lost / moved if moved else None
