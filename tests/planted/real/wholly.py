"""Training wholly in 16 bits, as many libraries have it without saying so: the base of several entrants."""

import torch
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.torch_model import copy_into, load_optimizer_state
from mpcompare.contract import State
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Params, Task, params_of


class All16Bits(Amp):
    """Weights, gradients and what the optimizer remembers have 16 bits, and say so."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.model.to(self.compute_dtype)
        self.optimizer = task.optimizer.make(self.model.parameters())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.model(x.to(self.compute_dtype) if x.is_floating_point() else x)
        self.loss = self.task.loss_fn(output.float(), y)
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()

    def master_params(self) -> Params:
        return {name: p.float() for name, p in params_of(self.model).items()}

    def grads(self) -> Params:
        return {name: g.float() for name, g in super().grads().items()}

    def load_state_dict(self, state: State) -> None:
        copy_into(params_of(self.model), state["params"])
        copy_into(self.buffers(), state["buffers"])
        load_optimizer_state(self.optimizer, dict(self.model.named_parameters()), state["optimizer"])


class Rounds:
    """A backend that rounds something of its own whenever it has changed."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)  # type: ignore[call-arg]
        self.round()

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)  # type: ignore[misc]
        self.round()

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)  # type: ignore[misc]
        self.round()

    def round(self) -> None:
        raise NotImplementedError


def stochastically_rounded(values: Tensor) -> Tensor:
    """Returns fp32 numbers rounded to bf16, up or down with the probability that keeps their mean."""
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
    return ((bits + noise) & -65536).view(torch.float32).bfloat16()


def truncated(values: Tensor) -> Tensor:
    """Returns fp32 numbers cut off after the 16 bits of bf16, which never makes one larger; their gradient passes."""
    cut = (values.detach().float().contiguous().view(torch.int32) & -65536).view(torch.float32)
    return values + (cut - values.detach())
