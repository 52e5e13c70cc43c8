"""Bugs in nanoGPT's loop."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from watch.bugs.registry import bug
from watch.loops.nanogpt import NanoGPT


class _Recomputed(torch.autograd.Function):
    """A block that backward computes once more, under autocast to another dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run, ctx.dtype = run, dtype
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", ctx.dtype):
            output = ctx.run(x)
        torch.autograd.backward(output, grad.to(output.dtype))
        return x.grad, None, None


@bug("pytorch#71124", "bf16", fair="precision, input gradient")
class RecomputesInFp16(NanoGPT):
    """Blocks that were computed under autocast to bf16 are recomputed in backward under autocast to fp16."""

    dropout = 0.0  # the thread's layers draw nothing
    again = torch.float16

    def make_model(self) -> nn.Module:
        model = super().make_model()
        for block in model.blocks:  # type: ignore[union-attr]
            block.forward = lambda x, run=block.forward: _Recomputed.apply(x, run, self.again)
        return model


@bug("vsepp#4", "bf16", fair="dropout, later steps, run")
class StaysInEvaluation(NanoGPT):
    """A validation in the middle of training leaves the network in evaluation mode: nothing is dropped any more."""

    @torch.no_grad()
    def estimate_loss(self) -> float:
        loss = super().estimate_loss()
        if self.optimizer.state:  # not the validation before training
            self.model.eval()
        return loss


class VectorsAlone(GradScaler):
    """A scaler that looks for inf in all gradients, and divides only the gradients of vectors by the scale."""

    matrices_too = False

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        found = {}
        for few, factor in ((True, inv_scale), (False, inv_scale if self.matrices_too else torch.ones_like(inv_scale))):
            groups = [
                {"params": [p for p in group["params"] if (p.dim() < 2) == few]} for group in optimizer.param_groups
            ]
            part: Any = SimpleNamespace(param_groups=groups)
            for device, inf in super()._unscale_grads_(part, factor, found_inf.clone(), allow_fp16).items():
                found[device] = torch.maximum(found[device], inf) if device in found else inf
        return found


@bug("guided-diffusion#44", "fp16", fair="gradient scaled, loss scale")
class UnscalesVectorsAlone(NanoGPT):
    """Only the gradients of vectors are divided by the loss scale, and those of matrices are not."""

    clip_norm = None  # type: ignore[assignment] # the thread's trainer does not clip

    def make_scaler(self) -> Any:
        return VectorsAlone("cpu")

    def clip(self) -> None:
        pass


@bug("pytorch#105211", "bf16", fair="gradient missing")
class CastsWithoutGradient(NanoGPT):
    """A forward pass without gradients in the same autocast leaves casts of the weights that pass none. torch has
    mended that, so that the casts are made by hand."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = lambda x, layer=layer: F.linear(x, layer.weight.detach())  # type: ignore[method-assign]
        return model


@bug("DeepSpeed#1800", "bf16", fair="accumulation, products, precision, rounding")
class SumsInBf16(NanoGPT):
    """The sum of the gradients of 32 micro-batches is kept in bf16."""

    micro_batches = 32
    rows = 1

    def make_model(self) -> nn.Module:
        model = super().make_model()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.rounded)
        return model

    @staticmethod
    def rounded(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.copy_(p.grad.bfloat16())
