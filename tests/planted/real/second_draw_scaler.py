"""Real bugs of the second draw: loss scaling, skipped steps and master weights."""

import torch
from planted.real.registry import Theme
from planted.real.second_draw_settings import MLP_ADAMW_COSINE_SKIPS, REGRESSION_HUGE
from planted.real.settings import GPT, MLP_ADAMW, MLP_MOMENTUM
from planted.real.wholly import Rounds
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.torch_model import set_lr
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale, any_non_finite
from mpcompare.tasks.task import Task

SCALER, MASTERS = Theme("scaler", draw=2), Theme("masters", draw=2)


@SCALER.plants(
    "THUDM/slime/pull/1842", MLP_ADAMW, "fp16", fair="gradient scaled, underflow, loss scale", also="Relax#44"
)
class UnscalesTwice(MasterWeights):
    """The trainer prepares the gradients, and the optimizer's step prepares them again: they are divided by the scale
    twice, and the scale is updated twice."""

    def unscale(self) -> None:
        super().unscale()
        self.scaling.update(self.found_inf)
        for g in self.grads().values():
            g.mul_(self.scaling.inv_scale)


@SCALER.plants("tensorflow/tensorflow/issues/38357", REGRESSION_HUGE, "fp16", fair="loss scale, skip, overflow")
class ScaleNotBelow1(MasterWeights):
    """TensorFlow's dynamic loss scale never goes below 1: where gradients overflow at 1, every step is skipped."""

    def update(self) -> None:
        super().update()
        if isinstance(self.scaling, DynamicLossScale):
            self.scaling.scale = max(self.scaling.scale, 1.0)


@SCALER.plants(
    "huggingface/accelerate/issues/4242",
    MLP_ADAMW_COSINE_SKIPS,
    "fp16",
    fair="skip, after a skip, schedule",
    also="accelerate#4243",
)
class FusedSkipNotSeen(Amp):
    """A fused optimizer is called and skips by itself; accelerate sees the call, and says that the step was taken."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.optimizer = task.optimizer.make(self.model.parameters(), fused=True)

    def step(self, lr: float | Tensor) -> None:
        set_lr(self.optimizer, lr)
        calls: list[bool] = []
        hook = self.optimizer.register_step_post_hook(lambda *_: calls.append(True))
        self.scaler.step(self.optimizer)
        hook.remove()
        self.skipped = not calls


@SCALER.plants("alibaba/EasyNLP/issues/64", MLP_MOMENTUM, "fp16", fair="after a skip, skip, overflow, loss scale")
class GradientsNotCleared(Amp):
    """With amp the trainer clears no gradients: once they are inf, they stay inf, and every later step is skipped."""

    def update(self) -> None:
        self.scaler.update(self.static_scale)


@SCALER.plants("mlnomadpy/flaxchat/issues/6", MLP_ADAMW, "bf16", fair="skip, after a skip, moments")
class ZerosInsteadOfASkip(MasterWeights):
    """Where gradients are not finite they become 0, and the optimizer takes its step all the same: counts, moments and
    decay go on."""

    def unscale(self) -> None:
        super().unscale()
        if any_non_finite(self.grads().values()):
            for g in self.grads().values():
                g.zero_()


@SCALER.plants("engichang1467/Open-Rig3R/issues/35", GPT, "fp16", fair="loss scale, underflow, precision")
class AutocastWithoutScaler(Amp):
    """autocast defaults to fp16, and there is no GradScaler."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, NoLossScale())


@MASTERS.plants("PaddlePaddle/Paddle/pull/38991", GPT, "fp16", fair="no master weights, precision")
class NoMastersBesideFp32(Rounds, MasterWeights):
    """The momentum of many tensors at once turns masters off when it meets an fp32 parameter, and the fp16 parameters
    that follow have none. Here these are all but norms and embeddings."""

    def round(self) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                self.masters[name].copy_(p)


@MASTERS.plants("NVIDIA/apex/issues/1842", MLP_ADAMW, "bf16", fair="optimizer, no master weights")
class RemainderOfATie(MasterWeights):
    """A master is kept as the bf16 weight and the 16 bits that are missing. Where these lie in the middle between two
    weights, and the weight is the lower one, the master that is put together again is one bf16 step too small."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        with torch.no_grad():
            for master in self.masters.values():
                missing = master.view(torch.int32) & 0xFFFF
                weight = master.bfloat16().view(torch.int16).int() - (missing >= 0x8000).int()
                master.copy_(((weight << 16) | missing).view(torch.float32))
