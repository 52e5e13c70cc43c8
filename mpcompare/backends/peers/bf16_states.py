"""``amp`` whose optimizer keeps its moments in bf16 between two steps, as many do to save their memory.

Each step computes in fp32, from moments that were rounded when they were stored. Adam's v moves by a thousandth of
itself in a step, which bf16 rounds away.
"""

import torch
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.contract import State
from mpcompare.loss_scale import LossScale
from mpcompare.promises import Promises
from mpcompare.tasks.task import Task


class Bf16States(Amp):
    """fp32 weights, moments in bf16."""

    name = "bf16_states"
    peak_of = None

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.optimizer.register_step_pre_hook(lambda optimizer, *_: _store(optimizer, torch.float32))
        self.optimizer.register_step_post_hook(lambda optimizer, *_: _store(optimizer, torch.bfloat16))
        self.promises = Promises(moments="bf16" if task.optimizer.remembers else "fp32")

    def state_dict(self) -> State:
        state = super().state_dict()
        moments = state["optimizer"].items()
        return {**state, "optimizer": {kind: {name: t.float() for name, t in each.items()} for kind, each in moments}}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        _store(self.optimizer, torch.bfloat16)


def _store(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Rounds the moments to ``dtype``; the counts of updates stay as they are."""
    for state in optimizer.state.values():
        for kind, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[kind] = value.to(dtype)
