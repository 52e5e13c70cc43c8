"""Automatic mixed precision exactly as PyTorch's recipe says: ``torch.autocast`` and ``torch.amp.GradScaler``.

https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from mpcompare.backends.memory_models.autograd import autograd_peak
from mpcompare.backends.memory_models.mlp import PeakOf
from mpcompare.backends.torch_model import (
    TorchModel,
    clip_gradients,
    gradient_dtype,
    require_kernels,
    set_lr,
    share_of_step,
    skipped_by,
)
from mpcompare.dtypes import torch_dtype
from mpcompare.errors import InputError
from mpcompare.loss_scale import (
    OF_GRAD_SCALER,
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
    require_one_of,
)
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.task import Task


def grad_scaler(scaling: LossScale, device: str) -> torch.amp.GradScaler:
    """Returns the ``GradScaler`` of the same policy; without loss scaling a disabled one, as the recipe has it. Raises
    InputError where GradScaler has no such policy: it has neither a floor nor hysteresis."""
    require_one_of(OF_GRAD_SCALER, scaling, "GradScaler")
    if isinstance(scaling, NoLossScale):
        return torch.amp.GradScaler(device, enabled=False)
    if isinstance(scaling, DynamicLossScale):
        if scaling.min_scale != 0:
            expected = "GradScaler has no floor, its backends accept 0"
            raise InputError("loss_scale.min_scale", scaling.min_scale, expected)
        if scaling.hysteresis != 1:
            raise InputError("loss_scale.hysteresis", scaling.hysteresis, "GradScaler has none, its backends accept 1")
        return torch.amp.GradScaler(device, **scaling.of_grad_scaler)
    return torch.amp.GradScaler(device, init_scale=scaling.init_scale)  # update(new_scale) keeps it static


class Amp(TorchModel):
    """``autocast`` around forward and loss, ``GradScaler`` around backward and step, on the fp32 parameters."""

    name: ClassVar[str] = "amp"  # of the backend, for its messages
    PRECISIONS = ("fp16", "bf16")
    IDLE_PHASES: tuple[str, ...] = ()
    peak_of: ClassVar[PeakOf | None] = autograd_peak

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        self.task, self.precision = task, precision
        self.device_type = next(model.parameters()).device.type
        require_kernels(model, self.device_type, precision, self.name)
        self.compute_dtype = torch_dtype(PRECISIONS[precision].storage)
        self.model = copy_of(model)
        self.optimizer = task.optimizer.make(self.model.named_parameters())
        self.scaler = grad_scaler(loss_scale, self.device_type)
        # GradScaler.update() gets a static scale. Without one it would choose a scale of its own.
        self.static_scale = loss_scale.init_scale if type(loss_scale) is StaticLossScale else None
        self.skipped: bool | Tensor = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            output = self.model(x)
            loss = self.task.loss_fn(output, y)
        return self.observe(output, loss)

    def backward(self) -> None:
        self.scaler.scale(share_of_step(self.task, self.loss, self.share)).backward()
        self.observed["gradients"] = gradient_dtype(self.model)

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def clip(self) -> None:
        self.grad_norm = clip_gradients(self.task, self.model.parameters())

    def step(self, lr: float | Tensor) -> None:
        set_lr(self.optimizer, lr)
        self.skipped = skipped_by(lambda: self.scaler.step(self.optimizer), self.optimizer)

    def update(self) -> None:
        self.scaler.update(self.static_scale)
        self.optimizer.zero_grad(set_to_none=True)
