"""Real bugs of loss scaling and skipped steps."""

from dataclasses import asdict, replace
from unittest import mock

import torch
from planted.real.registry import Theme
from planted.real.settings import MLP, MLP_GROWS, MLP_MOMENTUM
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.contract import State
from mpcompare.loss_scale import LossScale, any_non_finite
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Params, Task

SCALER = Theme("scaler")


@SCALER.plants(
    "LibreYOLO/libreyolo/pull/771",
    MLP_MOMENTUM,
    "fp16",
    fair="after a skip, momentum, moments, skip",
    name="LibreYOLO#771",
)
class FusedSgd(Amp):
    """torch's own fused SGD: a first step that overflows leaves the momentum as memory that nobody filled (NaN here),
    and the next step takes it for momentum."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        settings = {name: value for name, value in asdict(task.optimizer).items() if name != "groups"}  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), **settings, fused=True)

    def step(self, lr: float | Tensor) -> None:
        with mock.patch.object(torch, "empty_like", lambda t, **_: torch.full_like(t, torch.nan)):
            super().step(lr)


class UnscalesByTheNextScale(MasterWeights):
    """FP16_Optimizer updates the scale before it divides the gradients by it: they are halved where it grows."""

    def unscale(self) -> None:
        scaled = [master.grad for master in self.masters.values() if master.grad is not None]
        self.found_inf = self.scaling.found_inf(scaled)
        self.scaling.update(self.found_inf)
        for g in scaled:
            g.mul_(self.scaling.inv_scale)

    def update(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


PATH = "deepspeedai/DeepSpeed/pull/8588"
SCALER.plants(PATH, MLP_GROWS, "fp16", fair="gradient scaled, loss scale")(UnscalesByTheNextScale)
SCALER.plants(PATH, MLP, "fp16", fair="gradient scaled, loss scale", name="DeepSpeed#8588, its defaults")(
    UnscalesByTheNextScale
)


@SCALER.plants(
    "deepspeedai/Megatron-DeepSpeed/issues/282",
    MLP,
    "fp16",
    fair="gradient scaled, underflow, loss scale",
    also="DeepSpeed#8393 (not found)",
)
class LossNotScaled(MasterWeights):
    """The loss is not multiplied by the scale, and gradients are divided by it: the loss falls slowly."""

    def backward(self) -> None:
        self.loss = self.loss / self.scaling.scale
        super().backward()


@SCALER.plants(
    "deepspeedai/DeepSpeed/issues/8432", MLP_MOMENTUM, "fp16", fair="skip, after a skip, overflow, loss scale"
)
class MomentumBeforeTheCheck(MasterWeights):
    """Momentum takes up the gradient before it is searched for inf, and stays inf: every later step is skipped, too.
    There it is Muon's, here that of SGD."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        assert isinstance(task.optimizer, Sgd)
        self.beta = task.optimizer.momentum
        plain = replace(task.optimizer, momentum=0.0)
        self.optimizer = plain.make(self.masters[name] for name in self.params)
        self.momentum = {name: torch.zeros_like(self.masters[name]) for name in self.params}
        self.shown: Params = {}

    def unscale(self) -> None:
        super().unscale()
        self.shown = {name: g.clone() for name, g in super().grads().items()}
        for name, g in super().grads().items():
            self.masters[name].grad = self.momentum[name].mul_(self.beta).add_(g).clone()
        self.found_inf = any_non_finite(self.momentum.values())

    def grads(self) -> Params:
        return self.shown

    def state_dict(self) -> State:
        return {**super().state_dict(), "optimizer": {"momentum_buffer": self.momentum}}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict({**state, "optimizer": {}})
        for name, value in state["optimizer"].get("momentum_buffer", {}).items():
            self.momentum[name].copy_(value)


@SCALER.plants("deepspeedai/DeepSpeed/issues/8415", MLP, "bf16", fair="skip")
class SkipsWithoutAWord(MasterWeights):
    """In bf16, where nothing is scaled, a step whose gradients hold inf is skipped all the same, without a word."""

    def unscale(self) -> None:
        super().unscale()
        self.found_inf = any_non_finite(self.grads().values())
