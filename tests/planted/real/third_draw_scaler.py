"""Real bugs of the third draw: loss scaling and skipped steps."""

import copy

from planted.real.registry import Theme
from planted.real.settings import MLP_ADAMW, MLP_MOMENTUM
from planted.real.third_draw_settings import MLP_OVERFLOW
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Task

SCALER = Theme("scaler", draw=3)


@SCALER.plants("Azure/MS-AMP/pull/56", MLP_OVERFLOW, "fp16", fair="skip, overflow, after a skip")
class NanPassesTheCheck(MasterWeights):
    """The check for overflow looks for inf and not for NaN, so a step whose gradients are NaN is taken. There they are
    those of fp8 weights, here those of fp16 ones."""

    def unscale(self) -> None:
        super().unscale()
        self.found_inf = any(bool(g.isinf().any()) for g in self.grads().values())


@SCALER.plants("openai/guided-diffusion/issues/44", MLP_ADAMW, "fp16", fair="gradient scaled, loss scale")
class UnscalesVectorsAlone(MasterWeights):
    """Parameters lie in two flat masters, of vectors and of matrices, and only the gradient of the first one is divided
    by the loss scale."""

    def unscale(self) -> None:
        super().unscale()
        for g in self.grads().values():
            if g.dim() > 1:
                g.mul_(self.scaling.scale)


@SCALER.plants(
    "conservationtechlab/animl-py/issues/298", MLP_MOMENTUM, "fp16", fair="loss scale, after a skip, skip, overflow"
)
class ScalerOfAnEpoch(Amp):
    """Each epoch makes a new GradScaler, whose scale begins anew. Here an epoch has 6 steps."""

    taken = 0

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.fresh = copy.deepcopy(self.scaler)

    def update(self) -> None:
        super().update()
        self.taken += 1
        if self.taken % 6 == 0:
            self.scaler = copy.deepcopy(self.fresh)
