"""Automatic mixed precision exactly as PyTorch's recipe says: ``torch.autocast`` and ``torch.amp.GradScaler``.

https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html
"""

from typing import Any

import torch
from torch import Tensor

from mpcompare.contract import DTYPES, MemoryModel, dtype_name
from mpcompare.cost import memory
from mpcompare.errors import InputError
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from mpcompare.tasks import mlp


def grad_scaler(policy: LossScale, device: str) -> torch.amp.GradScaler:
    """The ``GradScaler`` of the same rules; with no loss scaling a disabled one, as the recipe has it."""
    if isinstance(policy, NoLossScale):
        return torch.amp.GradScaler(device, enabled=False)
    if isinstance(policy, DynamicLossScale):
        if policy.min_scale != 0:
            raise InputError("loss_scale.min_scale", policy.min_scale, "GradScaler has no floor, its backends accept 0")
        if policy.hysteresis != 1:
            raise InputError("loss_scale.hysteresis", policy.hysteresis, "GradScaler has none, its backends accept 1")
        return torch.amp.GradScaler(
            device,
            init_scale=policy.init_scale,
            growth_factor=policy.growth_factor,
            backoff_factor=policy.backoff_factor,
            growth_interval=policy.growth_interval,
        )
    return torch.amp.GradScaler(device, init_scale=policy.init_scale)  # kept static by update(new_scale)


class Amp:
    """``autocast`` around forward and loss, ``GradScaler`` around backward and step, SGD on the fp32 parameters."""

    PRECISIONS = ("fp16", "bf16")
    IDLE_PHASES: tuple[str, ...] = ()
    engine = "torch"

    def __init__(self, params: mlp.Params, task: mlp.Task, precision: str, loss_scale: LossScale, engine: str) -> None:
        self.task = task
        self.device_type = params["W1"].device.type
        self.compute_dtype = DTYPES[precision]
        self.model = mlp.to_module(params)
        self.weight = next(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=task.lr, momentum=task.momentum)
        self.scaler = grad_scaler(loss_scale, self.device_type)
        # GradScaler.update() takes the next scale where it is not to choose one.
        self.static_scale = loss_scale.init_scale if type(loss_scale) is StaticLossScale else None
        self.optimizer.register_step_post_hook(self._stepped)  # GradScaler calls step() or leaves it out
        self.skipped = False

    def _stepped(self, *_: object) -> None:
        self.skipped = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            output = self.model(x)
            self.loss = mlp.loss_fn(self.task.loss, output, y)
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()

    def backward(self) -> None:
        self.scaler.scale(self.loss).backward()
        self.observed["gradients"] = self.weight.grad.dtype  # type: ignore[union-attr]

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.skipped = True
        self.scaler.step(self.optimizer)

    def update(self) -> None:
        self.scaler.update(self.static_scale)
        self.optimizer.zero_grad(set_to_none=True)

    def master_params(self) -> mlp.Params:
        return mlp.module_params(self.model)

    def grads(self) -> mlp.Params:
        return mlp.module_grads(self.model)

    def loss_scale(self) -> Tensor:
        return self.scaler.scale(torch.ones((), device=self.device_type))  # 1 * scale, without the wait of get_scale()

    def dtypes(self) -> dict[str, str]:
        state = self.optimizer.state[self.weight].get("momentum_buffer")
        optimizer = self.weight if state is None else state  # plain SGD has no state: it computes in the weight's dtype
        observed = {"params": self.weight.dtype, **self.observed, "optimizer": optimizer.dtype}
        return {name: dtype_name(dtype) for name, dtype in observed.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    @staticmethod
    def memory_model(task: mlp.Task, precision: str, engine: str) -> MemoryModel:
        return memory.autograd_peak(task, precision)
