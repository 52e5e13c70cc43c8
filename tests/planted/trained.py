"""Planted bugs that begin when training has gone on for a while: the first steps of every new backend are right."""

from functools import partial
from typing import Any

import torch
from planted.recipe import ADAMW, CLIP, MOMENTUM, make
from planted.registry import BF16, FP16, Family
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.scratch import Scratch
from mpcompare.tasks.images import MnistCnn
from mpcompare.tasks.optimizers import Sgd

LATER = Family("trained", make, steps=20)


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 10))


NORMED: dict[str, Any] = {"model": normed}


class Late:
    """A backend that goes wrong after ``after`` steps."""

    after = 10
    taken = 0

    @property
    def late(self) -> bool:
        return self.taken > self.after


class LateAmp(Late, Amp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.taken += 1
        return super().forward(x, y)


class LateScratch(Late, Scratch):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.taken += 1
        return super().forward(x, y)


@LATER.plants("weight decay", task=ADAMW)
class DecayStops(LateAmp):
    def step(self, lr: float | Tensor) -> None:
        if self.late:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.0
        super().step(lr)


@LATER.plants("update left out", task=MOMENTUM)
class BiasesStop(LateScratch):
    """Biases stay as they are."""

    def step(self, lr: float | Tensor) -> None:
        biases = {name: master.clone() for name, master in self.masters.items() if name.startswith("b")}
        super().step(lr)
        self.masters |= biases if self.late else {}


@LATER.plants("clip", task=CLIP)
class ClipsNoMore(LateScratch):
    """The norm is still said, and the gradients stay what they are."""

    def clip(self) -> None:
        before = {name: g.clone() for name, g in self.unscaled.items()}
        super().clip()
        if self.late:
            self.unscaled = before


@LATER.plants("moments", task=ADAMW)
class MomentsLoseTheirDigits(LateAmp):
    """The moments are kept in bf16 from then on."""

    def update(self) -> None:
        super().update()
        if self.late:
            for state in self.optimizer.state.values():
                for kind in ("exp_avg", "exp_avg_sq"):
                    state[kind].copy_(state[kind].bfloat16())


@LATER.plants("moments", task=MOMENTUM)
class MomentumLosesItsDigits(LateScratch):
    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        if self.late:
            for kept in self.remembered.values():
                kept["momentum_buffer"].copy_(kept["momentum_buffer"].bfloat16())


@LATER.plants("bias correction", task=ADAMW)
class CountsFromZeroAgain(LateAmp):
    """The optimizer is made anew, and keeps the means of the old one."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        if self.taken == self.after:
            for state in self.optimizer.state.values():
                state["step"].zero_()


@LATER.plants("running statistics", task=NORMED)
class StatisticsStop(LateAmp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d) and self.taken >= self.after:
                module.momentum = 0.0
        return super().forward(x, y)


@LATER.plants("running statistics", task=NORMED)
class StatisticsTakeUpInf(LateAmp):
    """A batch that overflows moves the statistics, which never come back from it."""

    def update(self) -> None:
        super().update()
        if self.taken == self.after:
            self.model[2].running_var[0] = torch.inf  # type: ignore[index]


@LATER.plants("running statistics", task=NORMED)
class StatisticsOfOneBatchTwice(LateAmp):
    """One batch moves the statistics twice, as where its forward pass is computed again."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.taken == self.after:
            with torch.no_grad():
                self.model(x)
        return super().forward(x, y)


@LATER.plants("buffers in 16 bits", task=NORMED)
class CountInBf16(Amp):
    """The count of batches is kept in bf16, which holds 20 of them, and stops at 256."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        norm: Any = self.model[2]
        norm.num_batches_tracked = norm.num_batches_tracked.bfloat16()


@LATER.plants("buffers in 16 bits", task=NORMED)
class StatisticsLoseTheirDigits(LateAmp):
    """The statistics are rounded to bf16 from then on."""

    def update(self) -> None:
        super().update()
        for buffer in self.buffers().values() if self.late else ():
            if buffer.is_floating_point():
                buffer.copy_(buffer.bfloat16())


@LATER.plants("running statistics", task=NORMED)
class VarianceEnlargedOnce(LateAmp):
    """The running variance is 8 times as large after one step in the middle of training."""

    def update(self) -> None:
        super().update()
        if self.taken == self.after:
            norm: Any = self.model[2]
            norm.running_var *= 8


@LATER.plants("held-out samples", precisions=FP16, task={**NORMED, "optimizer": Sgd(0.5, 0.9)})
class VarianceEnlargedALittle(LateAmp):
    """The running variance is 1.5 times as large after one step: within the noise of all buffers together, and the
    network computes another function when it is evaluated."""

    def update(self) -> None:
        super().update()
        if self.taken == self.after:
            norm: Any = self.model[2]
            norm.running_var *= 1.5


CONVOLUTIONS: dict[str, Any] = {"model": partial(MnistCnn, 8), **MOMENTUM}


@LATER.plants("update left out", precisions=BF16, task=CONVOLUTIONS)
class OneUpdateLeftOut(LateAmp):
    def step(self, lr: float | Tensor) -> None:
        if self.taken == self.after:
            self.skipped = False
        else:
            super().step(lr)


@LATER.plants("update left out", precisions=BF16, task=CONVOLUTIONS)
class BiasesLeftOutOnce(LateAmp):
    def step(self, lr: float | Tensor) -> None:
        biases = {p: p.detach().clone() for name, p in self.model.named_parameters() if name.endswith("bias")}
        super().step(lr)
        with torch.no_grad():
            for p, before in biases.items() if self.taken == self.after else ():
                p.copy_(before)


@LATER.plants("no master weights", precisions=BF16, task=CONVOLUTIONS)
class MastersFromTheCopiesOnce(LateAmp):
    """The weights are rounded to bf16 after one step."""

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for p in self.model.parameters() if self.taken == self.after else ():
                p.copy_(p.bfloat16())
