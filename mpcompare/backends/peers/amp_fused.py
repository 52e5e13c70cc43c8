"""``amp`` with torch's fused optimizer, exactly as the documentation writes it: ``torch.optim.SGD(..., fused=True)``.

``GradScaler`` leaves it to a fused optimizer to unscale and to skip. Nothing is repaired here. In torch 2.15 fused SGD
makes its momentum in the first step, unfilled, and does not fill it if that step is skipped: the next one multiplies
whatever stood in that memory.
"""

from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Task


class AmpFused(Amp):
    """``autocast``, ``GradScaler`` and a fused optimizer."""

    name = "amp_fused"
    peak_of = None

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.optimizer = task.optimizer.make(self.model.named_parameters(), fused=True)
        self.optimizer.state.clear()  # the task's maker fills the momentum beforehand; the documentation does not
