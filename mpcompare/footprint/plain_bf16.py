"""A step whose parameters, gradients and moments are all bf16: the smallest, and one that loses updates."""

import copy

from torch import Tensor, nn

from mpcompare.backends.torch_model import clip_gradients, set_lr, share_of_step
from mpcompare.tasks.task import Task


class PlainBf16:
    """The module cast to bf16, and torch's optimizer on its bf16 parameters; the loss is computed in fp32."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self.task = task
        self.model = copy.deepcopy(model)
        for p in self.model.parameters():
            p.data = p.data.bfloat16()
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.bfloat16())
        self.optimizer = task.optimizer.make(self.model.parameters())
        self.skipped = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.model(x.bfloat16() if x.is_floating_point() else x)
        self.loss = self.task.loss_fn(output.float(), y)
        return self.loss.detach()

    def backward(self) -> None:
        share_of_step(self.task, self.loss).backward()

    def unscale(self) -> None:
        """Does nothing: bf16 has fp32's range, and needs no loss scale."""

    def clip(self) -> None:
        clip_gradients(self.task, self.model)

    def step(self, lr: float | Tensor) -> None:
        set_lr(self.optimizer, lr)
        self.optimizer.step()

    def update(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
