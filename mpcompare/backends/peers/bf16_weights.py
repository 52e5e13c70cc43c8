"""The module cast to bf16, and torch's optimizer on its bf16 parameters: mixed precision without the mixture.

    model = model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr)

It needs the least memory. But an update below half a gap of bf16, which is 1/256 to 1/512 of the weight, is rounded
away, and so is most of what a moment remembers. The loss is computed in fp32 from the bf16 output.
"""

import torch
from torch import Tensor, nn

from mpcompare.backends.fp32 import Fp32
from mpcompare.backends.torch_model import in_fp32
from mpcompare.errors import InputError
from mpcompare.loss_scale import LossScale
from mpcompare.promises import Promises
from mpcompare.tasks.cast import cast_wholly
from mpcompare.tasks.task import Params, Task


class Bf16Weights(Fp32):
    """The step of ``fp32``, on parameters, buffers, gradients and moments in bf16. bf16 has fp32's range, and needs no
    loss scale."""

    PRECISIONS = ("bf16",)
    peak_of = None
    promises = Promises(weights="bf16", moments="bf16")

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        if loss_scale.scales:
            raise InputError("loss_scale", loss_scale.name, "bf16 weights need none: expected one of auto, none")
        super().__init__(model, task, precision, loss_scale)
        cast_wholly(self.model, torch.bfloat16)
        self.optimizer = self.new_optimizer()
        if not task.optimizer.remembers:
            self.promises = Promises(weights="bf16")

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Returns the optimizer of the parameters of ``model``."""
        return self.task.optimizer.make(self.model.named_parameters())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.model(x.to(torch.bfloat16) if x.is_floating_point() else x)
        return self.observe(output, self.task.loss_fn(output.float(), y))

    def clip(self) -> None:
        super().clip()
        self.grad_norm = None if self.grad_norm is None else self.grad_norm.float()

    def as_shown(self, tensors: Params) -> Params:
        return in_fp32(tensors)
