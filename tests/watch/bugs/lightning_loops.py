"""Bugs in the loops of Lightning."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from watch.bugs.optimizers import EpsInTheRoot
from watch.bugs.registry import bug
from watch.loops.lightning_loops import FabricLoop, LightningTrainer


@bug("DeepSpeed#8415", "bf16", fair="skip")
class SkipsWithoutAWord(FabricLoop):
    """In bf16, where nothing is scaled, a step whose gradients hold inf is skipped all the same, without a word."""

    clip_norm = None
    taken = 0

    def batch(self) -> tuple[Tensor, Tensor]:
        x, target = super().batch()
        self.taken += 1
        if self.taken == 2:
            x[0, 0, 7, 7] = torch.inf
        return x, target

    def step(self) -> None:
        if all(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None):
            self.optimizer.step()


class _Rounded(torch.autograd.Function):
    """The mean cross-entropy of 16-bit logits, whose gradient is made from probabilities of a dtype."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
        log_p = logits.float().log_softmax(-1)
        ctx.save_for_backward(log_p.exp().to(dtype), target)
        ctx.dtype = logits.dtype
        return F.nll_loss(log_p, target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        p, target = ctx.saved_tensors
        difference = p.float().clone()
        difference.scatter_add_(-1, target[:, None], -torch.ones_like(difference[:, :1]))
        return (difference * (grad / len(target))).to(ctx.dtype), None, None


@bug("Liger-Kernel#1329", "bf16", fair="loss, input gradient, precision, rounding", after=300)
class TrueClassReadBack(LightningTrainer):
    """The gradient at the true class, p - 1, is computed from a p that was rounded to bf16: where p is nearly 1, little
    is left of it."""

    kept = torch.bfloat16

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = _Rounded.apply(output, target, self.kept)
        return loss


@bug("Flux.jl#448", "bf16", fair="eps")
class AdamEpsInTheRoot(LightningTrainer):
    """eps is added to v, and not to its root: 1e-8 does what 1e-4 would do beside the root."""

    def make_optimizer(self) -> Optimizer:
        return EpsInTheRoot(self.model.parameters(), lr=1e-3)


class _Focal(torch.autograd.Function):
    """The gradient of the focal loss of logarithms of probabilities, with its value or with the mean cross-entropy."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, target: Tensor, with_factor: bool) -> Tensor:
        ctx.save_for_backward(log_p, target)
        true = log_p.float().gather(1, target[:, None])
        return -((1 - true.exp()) ** 2 * true if with_factor else true).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        log_p, target = ctx.saved_tensors
        true = log_p.float().gather(1, target[:, None])
        p = true.exp()
        # of -(1 - p)^2 log p, with p = exp(log p)
        slope = 2 * (1 - p) * p * true - (1 - p) ** 2
        down = torch.zeros_like(log_p, dtype=torch.float32).scatter_(1, target[:, None], slope)
        return (down * grad / len(target)).to(log_p.dtype), None, None


@bug("dlib#2552", "bf16", fair="loss, input gradient")
class ValueWithoutTheFactor(FabricLoop):
    """The gradient is that of the focal loss, and its value that of the cross-entropy."""

    with_factor = False

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = _Focal.apply(output, target, self.with_factor)
        return loss
