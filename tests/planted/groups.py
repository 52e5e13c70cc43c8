"""Planted bugs of parameter groups: no decay on norms and biases, and a learning rate a group."""

from dataclasses import replace
from typing import Any

import torch
from planted.registry import BF16, Family
from support.tasks import make_task
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.scratch import Scratch
from mpcompare.contract import State
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.optimizers import AdamW, Sgd
from mpcompare.tasks.schedules import Warmup
from mpcompare.tasks.task import Task

SAMPLES, STEPS = 2560, 12
BASE = make_task(in_features=784, hidden=[64], out_features=10, batch_size=128, samples=SAMPLES)
NO_DECAY = {"kind": "vectors", "weight_decay": 0}
ADAMW = AdamW(1e-3, weight_decay=0.1, groups=[NO_DECAY])  # type: ignore[arg-type]
TWO_RATES: dict[str, Any] = {
    "optimizer": Sgd(0.05, 0.9, weight_decay=0.01, groups=[{"match": "layer2.*", "lr_factor": 0.1}, NO_DECAY])  # type: ignore[arg-type]
}


def make(**changes: Any) -> tuple[Task, Dataset]:
    return replace(BASE, **{"optimizer": ADAMW, **changes}), digits(0, SAMPLES)


GROUPS = Family("groups", make, STEPS)


@GROUPS.plants("parameter groups")
class DecayOfBiases(Amp):
    """The groups are forgotten: biases decay, too."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        task = replace(task, optimizer=replace(task.optimizer, groups=()))  # type: ignore[type-var]
        super().__init__(model, task, precision, loss_scale)


GROUPS.plants("parameter groups", name="GroupsLeftOut", task=TWO_RATES)(DecayOfBiases)


@GROUPS.plants("parameter groups")
class DecayOfBiasesAlone(Amp):
    """The two groups have each other's decay."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        first, second = self.optimizer.param_groups
        first["weight_decay"], second["weight_decay"] = second["weight_decay"], first["weight_decay"]


@GROUPS.plants("parameter groups", task=TWO_RATES)
class OneRateForAllGroups(Amp):
    """The schedule writes its rate into every group, whatever rate the group had."""

    def step(self, lr: float | Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr_factor"] = 1.0
        super().step(lr)


@GROUPS.plants("schedule", task={**TWO_RATES, "schedule": Warmup(8)})
class ScheduleOfTheFirstGroupAlone(Amp):
    """The other groups stay at the rate that they were made with."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.made = [group["lr"] for group in self.optimizer.param_groups[1:]]
        self.optimizer.register_step_pre_hook(self.put_back)

    def put_back(self, *_: object) -> None:
        for group, lr in zip(self.optimizer.param_groups[1:], self.made, strict=True):
            group["lr"] = lr


@GROUPS.plants("weight decay")
class DecayOfNothing(Amp):
    """The decay of one group is given to all."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0


@GROUPS.plants("update left out", precisions=BF16)
class OneGroupIsNotUpdated(Amp):
    """The optimizer is made of the first group alone. In fp16 GradScaler does not look at the rest either."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        del self.optimizer.param_groups[1:]


@GROUPS.plants("resume", task=TWO_RATES)
class MomentsOfAnotherGroup(Amp):
    """A saved state has its moments by number, and the groups were made in another order."""

    def load_state_dict(self, state: State) -> None:
        moments = state["optimizer"].get("momentum_buffer", {})
        first, second = "layer1.bias", "layer2.bias"
        if moments:
            moved = {**moments, first: torch.zeros_like(moments[first]), second: torch.zeros_like(moments[second])}
            state = {**state, "optimizer": {**state["optimizer"], "momentum_buffer": moved}}
        super().load_state_dict(state)


@GROUPS.plants("weight decay")
class GroupDecaysInTheGradient(Scratch):
    """AdamW's decay is added to the gradient, in the group that decays."""

    def step(self, lr: float | Tensor) -> None:
        for name in ("W1", "W2"):
            self.unscaled[name] = self.unscaled[name] + 0.1 * self.masters[name]
        kept, self.optimizer = self.optimizer, replace(self.optimizer, weight_decay=0.0)
        shown = {name: g - 0.1 * self.masters[name] if name[0] == "W" else g for name, g in self.unscaled.items()}
        super().step(lr)
        self.optimizer, self.unscaled = kept, shown
