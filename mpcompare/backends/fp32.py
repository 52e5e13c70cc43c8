"""Plain FP32 as torch users write it: the baseline of every gain by mixed precision."""

from typing import ClassVar

from torch import Tensor, nn

from mpcompare.backends.memory_models.autograd import autograd_peak
from mpcompare.backends.memory_models.mlp import PeakOf
from mpcompare.backends.torch_model import TorchModel, clip_gradients, gradient_dtype, set_lr, share_of_step
from mpcompare.errors import InputError
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.frozen import widen
from mpcompare.tasks.task import Task


class Fp32(TorchModel):
    """The module and torch's optimizer in IEEE FP32; backend ``tf32`` is the same with TF32 allowed."""

    PRECISIONS: tuple[str, ...] = ("fp32",)
    IDLE_PHASES = ("unscale",)
    peak_of: ClassVar[PeakOf | None] = autograd_peak

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        if loss_scale.scales:
            raise InputError("loss_scale", loss_scale.name, f"backend={precision} accepts one of auto, none")
        self.task, self.precision = task, precision
        self.model = widen(copy_of(model))
        self.optimizer = task.optimizer.make(self.model.named_parameters())
        self.skipped = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.model(x)
        return self.observe(output, self.task.loss_fn(output, y))

    def backward(self) -> None:
        share_of_step(self.task, self.loss, self.share).backward()
        self.observed["gradients"] = gradient_dtype(self.model)

    def unscale(self) -> None:
        pass

    def clip(self) -> None:
        self.grad_norm = clip_gradients(self.task, self.model.parameters())

    def step(self, lr: float | Tensor) -> None:
        set_lr(self.optimizer, lr)
        self.optimizer.step()

    def update(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def loss_scale(self) -> float:
        return 1.0
