"""Planted bugs of parameters that have no gradient in some steps: parameters of a branch that is not taken."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from planted.registry import BF16, Family
from support.branches import Branches, branched
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.task import Task

BASE = Task(partial(Branches, 16, 32, 10, 2), "cross_entropy", AdamW(1e-3, weight_decay=0.1), 32, 640)
DECAY: dict[str, Any] = {"optimizer": Sgd(0.05, weight_decay=0.01)}
MOMENTUM: dict[str, Any] = {"optimizer": Sgd(0.05, 0.9)}
ADAM: dict[str, Any] = {"optimizer": Adam(1e-3)}


def make(**changes: Any) -> tuple[Task, Dataset]:
    return replace(BASE, **changes), branched(0, 640, 16, 10, 32, [0, 1])


BRANCHES = Family("branches", make, steps=12)


class GradientsStay(Amp):
    """``zero_grad(set_to_none=False)``: gradients become 0 and stay."""

    def update(self) -> None:
        self.scaler.update(self.static_scale)
        self.optimizer.zero_grad(set_to_none=False)


BRANCHES.plants("unused parameter")(GradientsStay)
BRANCHES.plants("unused parameter", name="GradientsStayWithMomentum", task=MOMENTUM)(GradientsStay)
BRANCHES.plants("unused parameter", name="GradientsStayWithAdam", task=ADAM)(GradientsStay)


@BRANCHES.plants("unused parameter", task=DECAY)
class ZerosForNone(MasterWeights):
    """All gradients lie in one buffer, which is 0 where no gradient was written, from the first step on."""

    def unscale(self) -> None:
        for name in self.params:
            if self.masters[name].grad is None:
                self.masters[name].grad = torch.zeros_like(self.masters[name])
        super().unscale()


@BRANCHES.plants("unused parameter")
class ZerosUnseen(Amp):
    """The optimizer decays the parameters of which it shows no gradient."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is None and not self.skipped:
                    p.mul_(1 - float(lr) * self.task.optimizer.weight_decay)  # type: ignore[attr-defined]


@BRANCHES.plants("resume", precisions=BF16)
class GradientsOfTheStepBefore(Amp):
    """Gradients are dropped where new ones come, and nowhere else: a branch is updated by its last gradient.
    A backend that has loaded a state has no such gradients, and goes another way."""

    def backward(self) -> None:
        kept = {p: p.grad for p in self.model.parameters()}
        for p in kept:
            p.grad = None
        super().backward()
        for p, g in kept.items():
            p.grad = g if p.grad is None else p.grad

    def update(self) -> None:
        self.scaler.update(self.static_scale)


@BRANCHES.plants("bias correction", task=ADAM)
class OneCountForAll(Amp):
    """The updates of all parameters are counted together, and Adam's correction of a branch is too small."""

    def step(self, lr: float | Tensor) -> None:
        taken = max((int(kept["step"]) for kept in self.optimizer.state.values() if kept), default=0)
        for p in self.model.parameters():
            if p.grad is not None and not self.optimizer.state[p] and taken:
                zeros = {kind: torch.zeros_like(p) for kind in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[p] = {"step": torch.tensor(float(taken)), **zeros}
            elif self.optimizer.state[p]:
                self.optimizer.state[p]["step"].fill_(float(taken))
        super().step(lr)
