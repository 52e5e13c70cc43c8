"""torchao: a bf16 module, and an AdamW that rounds its new weights up or down at random.

https://github.com/pytorch/ao/tree/main/torchao/optim

    model = model.to(torch.bfloat16)
    optimizer = torchao.optim._AdamW(model.parameters(), lr, bf16_stochastic_round=True)

Each update is computed in fp32 and compiled (it needs a C++ compiler on a CPU); the moments are kept in bf16. On
average no update is lost. Changed here: the learning rate is written into the tensor that torchao makes of the rate.
torchao has Adam and AdamW, and no SGD.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.amp_compile import require_compiler
from mpcompare.backends.peers.bf16_weights import Bf16Weights
from mpcompare.backends.peers.library import library
from mpcompare.errors import BackendUnavailable
from mpcompare.loss_scale import LossScale
from mpcompare.promises import Promises
from mpcompare.tasks.groups import refuse_groups
from mpcompare.tasks.optimizers import Adam, AdamW
from mpcompare.tasks.task import Task


class StochasticRounding(Bf16Weights):
    """bf16 weights, rounded at random."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        if not isinstance(task.optimizer, (Adam, AdamW)):
            raise BackendUnavailable("backend=stochastic_rounding: torchao has adam and adamw, and not this optimizer")
        refuse_groups(task.optimizer, "backend=stochastic_rounding")
        require_compiler(next(model.parameters()).device.type)
        super().__init__(model, task, precision, loss_scale)
        self.promises = Promises(weights="bf16", rounding="stochastic", moments="bf16")

    def new_optimizer(self) -> torch.optim.Optimizer:
        optim: Any = library("torchao.optim", "stochastic_rounding")
        asked = self.task.optimizer
        assert isinstance(asked, (Adam, AdamW))
        make = optim._AdamW if isinstance(asked, AdamW) else optim._Adam
        made: torch.optim.Optimizer = make(
            self.model.parameters(),
            lr=asked.lr,
            betas=asked.betas,
            eps=asked.eps,
            weight_decay=asked.weight_decay,
            bf16_stochastic_round=True,
        )
        return made

    def step(self, lr: float | Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr)
        self.optimizer.step()
