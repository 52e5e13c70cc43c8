"""Plain FP32 as torch users write it: the baseline of what mixed precision buys."""

from typing import Any

import torch
from torch import Tensor

from mpcompare.contract import MemoryModel, dtype_name
from mpcompare.cost import memory
from mpcompare.errors import InputError
from mpcompare.loss_scale import LossScale, NoLossScale
from mpcompare.tasks import mlp


class Fp32:
    """``nn.Sequential`` and ``torch.optim.SGD`` in IEEE FP32; backend ``tf32`` is the same with TF32 allowed."""

    PRECISIONS = ("fp32",)
    IDLE_PHASES = ("unscale",)
    engine = "torch"

    def __init__(self, params: mlp.Params, task: mlp.Task, precision: str, loss_scale: LossScale, engine: str) -> None:
        if not isinstance(loss_scale, NoLossScale):
            raise InputError("loss_scale", loss_scale.name, f"backend={precision} accepts one of auto, none")
        self.task = task
        self.model = mlp.to_module(params)
        self.weight = next(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=task.lr, momentum=task.momentum)
        self.skipped = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.model(x)
        self.loss = mlp.loss_fn(self.task.loss, output, y)
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()

    def backward(self) -> None:
        self.loss.backward()
        self.observed["gradients"] = self.weight.grad.dtype  # type: ignore[union-attr]

    def unscale(self) -> None:
        pass

    def step(self) -> None:
        self.optimizer.step()

    def update(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def master_params(self) -> mlp.Params:
        return mlp.module_params(self.model)

    def grads(self) -> mlp.Params:
        return mlp.module_grads(self.model)

    def loss_scale(self) -> float:
        return 1.0

    def dtypes(self) -> dict[str, str]:
        state = self.optimizer.state[self.weight].get("momentum_buffer")
        optimizer = self.weight if state is None else state  # plain SGD has no state: it computes in the weight's dtype
        observed = {"params": self.weight.dtype, **self.observed, "optimizer": optimizer.dtype}
        return {name: dtype_name(dtype) for name, dtype in observed.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    @staticmethod
    def memory_model(task: mlp.Task, precision: str, engine: str) -> MemoryModel:
        return memory.autograd_peak(task, precision)
