"""Bugs in timm's loop."""

import warnings
from typing import Any

import torch
from timm.utils import NativeScaler
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from watch.bugs.optimizers import CountsEachTensor, DecayInTheGradient
from watch.bugs.registry import bug
from watch.loops.timm_loop import Timm


@bug("pytorch#7617", "bf16", fair="gradient missing, unused parameter, update left out")
class FirstLayerRecomputed(Timm):
    """The first layer is recomputed in backward, by the reentrant way: its input needs no gradient, so its output needs
    none, and its parameters get none."""

    reentrant = True

    def make_model(self) -> nn.Module:
        model: Any = super().make_model()
        right = model.patch_embed.forward

        def recomputed(x: Tensor) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return checkpoint(right, x, use_reentrant=self.reentrant)

        model.patch_embed.forward = recomputed
        return model


@bug("nntrainer#3565", "fp16", fair="weight decay, moments")
class AdamWAsAdam(Timm):
    """AdamW adds the decay to the gradient, and keeps its moments in fp16."""

    def make_optimizer(self) -> Optimizer:
        return DecayInTheGradient(super().make_optimizer().param_groups, lr=1e-3, weight_decay=0.05)


@bug("flashlight#143", "bf16", fair="bias correction, weight decay, eps")
class AdamCountsEachTensor(Timm):
    """Adam counts once for each tensor, and corrects later tensors, and all in later updates, for too many updates. Its
    eps is added before the correction, and its decay is not multiplied by the learning rate."""

    optimizer_name = "adam"

    def make_optimizer(self) -> Optimizer:
        return CountsEachTensor(super().make_optimizer().param_groups, lr=1e-3, weight_decay=1e-4)


class InfAlone(GradScaler):
    """A scaler that looks for inf in the gradients, and not for NaN."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        inf = any(bool(p.grad.isinf().any()) for p in parameters)
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return {device: torch.full_like(flag, float(inf)) for device, flag in found.items()}


@bug("MS-AMP#56", "fp16", fair="skip, overflow, after a skip")
class NanPassesTheCheck(Timm):
    """The check for overflow looks for inf and not for NaN, so that the step of an image which overflows is taken."""

    taken = 0

    def make_scaler(self) -> Any:
        scaler = NativeScaler(device="cpu")
        scaler._scaler = InfAlone("cpu")
        return scaler

    def batch(self) -> tuple[Tensor, Tensor]:
        x, target = super().batch()
        self.taken += 1
        if self.taken == 4:
            x[0, 0, 8, 8] = 1e6
        return x, target
