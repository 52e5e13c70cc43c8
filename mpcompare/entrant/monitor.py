"""A closer look into single steps: the norm of the gradients, and the shares that the format loses of them."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpcompare.clipping import factor_of_norm
from mpcompare.contract import Batches, Stepper
from mpcompare.entrant.underflow import gradient_shares, lost_share, moving
from mpcompare.instruments.clock import Clock
from mpcompare.precision import Format
from mpcompare.tasks.task import Params, Task
from mpcompare.verdict.examine.numerics import total_norm


@dataclass(frozen=True)
class Monitor:
    """Takes the steps that are monitored, each bit for bit as it would have been.

    The clock does not run while it looks: a step by phases is timed up to ``unscale()`` and again from ``clip()`` on, a
    step in one piece before it is looked at. Looking slows ``step_ms`` all the same: caches are cold afterwards, and a
    GPU that was waited for has nothing queued. A copy of the parameters, and a byte for each of them, live meanwhile.

    Attributes:
        format: the one in which a step stores its gradients (:func:`~mpcompare.entrant.underflow.gradient_shares`).
        every: each step whose number is a multiple of this is monitored; None: none is.
    """

    task: Task
    format: Format
    clock: Clock
    every: int | None

    def due(self, step: int) -> bool:
        """Returns whether this step, counted from 1, is monitored."""
        return self.every is not None and step % self.every == 0

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
            decay = getattr(self.task.optimizer, "weight_decay", 0.0)
            moves = moving(nonzero, backend.state_dict()["optimizer"], before, decay)
            shares["lost_updates"] = lost_share(before, backend.master_params(), moves)
        return walk.loss, shares, 1 if whole else 2

    def _unclipped(self, norm: float | Tensor | None) -> float:
        """Returns the factor by which clipping has multiplied the gradients of a whole step.

        0 where their norm was inf or NaN, which leaves nothing to be seen.
        """
        if self.task.clip_norm is None or norm is None:
            return 1.0
        norm = float(norm)
        return factor_of_norm(norm, self.task.clip_norm) if math.isfinite(norm) else 0.0
