"""torch-optimi: a bf16 module, and an optimizer that keeps what rounding takes away in a second bf16 tensor (Kahan).

https://optimi.benjaminwarner.dev/kahan_summation/

    model = model.to(torch.bfloat16)
    optimizer = optimi.SGD(model.parameters(), lr, momentum=0.9)      # kahan_sum is on for 16-bit parameters

Changed here: ``kahan_sum=True`` is said, because optimi else turns it on in the first step of a new optimizer, and not
in one that loads a state of tensors alone. optimi has no Nesterov momentum, and its Adam no coupled weight decay. Its
moments after t updates are torch's moments over 1 - beta^t, so the state has them under names of their own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mpcompare.backends.peers.bf16_weights import Bf16Weights
from mpcompare.backends.peers.library import library
from mpcompare.contract import State
from mpcompare.errors import BackendUnavailable
from mpcompare.loss_scale import LossScale
from mpcompare.promises import Promises
from mpcompare.tasks.groups import refuse_groups
from mpcompare.tasks.optimizers import AdamW, Sgd, require_known
from mpcompare.tasks.task import Task

CORRECTED = {"exp_avg": "corrected_exp_avg", "exp_avg_sq": "corrected_exp_avg_sq"}  # optimi's names, and the state's


class Kahan(Bf16Weights):
    """bf16 weights with a compensation."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        refuse_groups(task.optimizer, "backend=kahan")
        super().__init__(model, task, precision, loss_scale)
        self.promises = Promises(
            weights="bf16", rounding="compensated", moments="bf16" if task.optimizer.remembers else "fp32"
        )

    def new_optimizer(self) -> torch.optim.Optimizer:
        optimi: Any = library("optimi", "kahan")
        optimizer, params = require_known(self.task.optimizer, "backend=kahan"), self.model.parameters()
        made: torch.optim.Optimizer
        if isinstance(optimizer, Sgd):
            if optimizer.nesterov:
                raise BackendUnavailable("backend=kahan: optimi's SGD has no Nesterov momentum")
            made = optimi.SGD(params, optimizer.lr, optimizer.momentum, optimizer.weight_decay, kahan_sum=True)
        elif optimizer.weight_decay and not isinstance(optimizer, AdamW):
            raise BackendUnavailable("backend=kahan: optimi's Adam has no coupled weight decay")
        else:
            adam = optimi.AdamW if isinstance(optimizer, AdamW) else optimi.Adam
            made = adam(params, optimizer.lr, optimizer.betas, optimizer.weight_decay, optimizer.eps, kahan_sum=True)
        return made

    def state_dict(self) -> State:
        state, count = super().state_dict(), self.optimizer.param_groups[0].get("step")
        if count is not None and state["optimizer"]:  # optimi counts the updates of all parameters together
            state["optimizer"]["step"] = {name: count.float() for name in self.grads() or state["params"]}
        return _renamed(state, CORRECTED)

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(_renamed(state, {theirs: ours for ours, theirs in CORRECTED.items()}))
        for kept in self.optimizer.state.values():
            kept.setdefault("exp_avg", None)  # optimi looks for the momentum of plain SGD, too
        for count in state["optimizer"].get("step", {}).values():
            self.optimizer.param_groups[0].update(step=count.detach().cpu().to(torch.int32), setup=True)


def _renamed(state: State, names: Mapping[str, str]) -> State:
    """Returns a state with other names of what the optimizer remembers."""
    return {**state, "optimizer": {names.get(kind, kind): tensors for kind, tensors in state["optimizer"].items()}}
