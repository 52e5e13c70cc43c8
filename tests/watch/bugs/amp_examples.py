"""Bugs in the loops of PyTorch's recipe and examples of automatic mixed precision."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from watch.bugs.optimizers import MultipliesTheCorrection, NoDecayWithoutMomentum
from watch.bugs.registry import bug
from watch.loops.amp_examples import AmpAccumulation, AmpClipping, AmpRecipe


@bug("convnetjs#70", "bf16", fair="bias correction, optimizer")
class CorrectionMultiplied(AmpAccumulation):
    """Both means of Adam are multiplied by what should divide them, 1 - beta^t."""

    def make_optimizer(self) -> Optimizer:
        return MultipliesTheCorrection(self.model.parameters(), lr=1e-3)


class ScalesInFp16(GradScaler):
    """A scaler that multiplies the loss in fp16."""

    def scale(self, outputs: Any) -> Any:
        super().scale(outputs.detach())  # this makes the scale
        assert self._scale is not None
        return outputs.half() * self._scale.half()


@bug("onnxruntime#4268", "fp16", fair="loss scale, overflow, skip, after a skip, loss, precision")
class ScaledInFp16(AmpRecipe):
    """The loss is fp16 and is multiplied by the scale in fp16, which has no 65536: the first gradient is inf."""

    def make_scaler(self) -> Any:
        return ScalesInFp16("cpu")


@bug("DeepSpeed#2695", "fp16", fair="clip, loss scale, gradient scaled", after=1996, steps=6)
class NormByTheNextScale(AmpClipping):
    """The norm that is reported is divided by the scale that comes after the update of the scale. The scale grows in
    the 2000th step."""

    def clip(self) -> None:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.norms = [*getattr(self, "norms", []), (norm, self.scaler.get_scale())]

    def reported(self) -> Tensor:
        """Returns the last norm, as it stands in the log after the scaler's update."""
        norm, scale = self.norms[-1]
        reported: Tensor = norm * scale / self.scaler.get_scale()
        return reported

    def batch(self) -> tuple[Tensor, Tensor]:
        if getattr(self, "norms", []):
            self.reported().item()
        return super().batch()


class _UpdatedFirst(torch.autograd.Function):
    """A linear layer whose weight is updated before its input gradient is taken."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rate = rate
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dw = (grad.t() @ x).float()
        return grad @ (weight - ctx.rate * dw).to(grad.dtype), dw, grad.sum(0).float(), None


@bug("zero_to_gpt#12", "bf16", fair="input gradient")
class UpdatesBeforeItGoesDown(AmpRecipe):
    """Each layer's weight is updated before the gradient goes down through it."""

    rate = 0.05  # the rate of the update that comes too early

    def make_model(self) -> nn.Module:
        model = super().make_model()
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = lambda x, layer=layer: _UpdatedFirst.apply(  # type: ignore[method-assign]
                    x.to(self.dtype), layer.weight, layer.bias, self.rate
                )
        return model


@bug("mlx#473", "bf16", fair="weight decay")
class NoDecay(AmpRecipe):
    """SGD without momentum returns before it comes to the decay."""

    def make_optimizer(self) -> Optimizer:
        return NoDecayWithoutMomentum(self.model.parameters(), lr=0.05, weight_decay=1e-4)


@bug("fairscale#263", "fp16", fair="clip, gradient missing", after=2)
class SquaresInFp16(AmpClipping):
    """Norms of tensors are squared in fp16, which holds none above 256^2: the norm is inf, and the factor 0."""

    clip_norm = 1.0
    norm_dtype = torch.float16

    def batch(self) -> tuple[Tensor, Tensor]:
        x, target = super().batch()
        return x, 20_000 * target  # so that the norm of a gradient is above 256

    def clip(self) -> None:
        grads = [p.grad for p in self.model.parameters()]
        norms = [torch.linalg.vector_norm(g.to(self.norm_dtype)) for g in grads]
        total = sum((norm**2 for norm in norms), torch.zeros((), dtype=self.norm_dtype)) ** 0.5
        for g in grads:
            g.mul_((self.clip_norm / (total.float() + 1e-6)).clamp(max=1.0))
