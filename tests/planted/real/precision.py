"""Real bugs of the precision in which a network computes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.real import networks
from planted.real.registry import Theme
from planted.real.settings import GPT, GPT_ADAMW, LLAMA, LLAMA_LONG, MLP
from planted.real.wholly import truncated
from torch import Tensor, nn
from torch.func import functional_call

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.loss_scale import LossScale, NoLossScale
from mpcompare.tasks.task import Task

PRECISION = Theme("precision")


@PRECISION.plants(
    "huggingface/accelerate/blob/main/src/accelerate/accelerator.py",
    MLP,
    "fp16",
    fair="precision, loss scale",
    name="accelerate, fp16 on a CPU",
    read="source",
)
class Fp16MeansFp32(Amp):
    """On a CPU mixed_precision="fp16" is neither autocast nor scaled, and nothing says so: it is fp32."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, NoLossScale())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.model(x)
        self.loss = self.task.loss_fn(output, y)
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()


class _Recomputed(torch.autograd.Function):
    """A part of a network that backward computes once more, under autocast to another dtype or (None) without it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run, ctx.dtype = run, dtype
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", ctx.dtype or torch.bfloat16, enabled=ctx.dtype is not None):
            output = ctx.run(x)
        torch.autograd.backward(output, grad.to(output.dtype))
        return x.grad, None, None


class RecomputesInFp16(layers.Patched):
    """Activations that are recomputed under autocast to bf16 are recomputed in fp16, its default."""

    dtype: torch.dtype | None = torch.float16

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.forward = lambda x, run=block.forward: _Recomputed.apply(x, run, self.dtype)


PRECISION.plants("pytorch/pytorch/issues/71124", GPT, "bf16", fair="precision, input gradient", also="fairscale#1199")(
    RecomputesInFp16
)


@PRECISION.plants("lightonai/pylate/pull/242", GPT, "bf16", fair="precision, input gradient")
class RecomputesOutsideAutocast(RecomputesInFp16):
    """Activations are recomputed after autocast has ended, in fp32, and take gradients of 16 bits."""

    dtype = None


@PRECISION.plants("pytorch/torchtitan/issues/4688", GPT, "bf16", fair="input gradient")
class RecomputesWithoutTheWrite(layers.Patched):
    """A write in place is left out when activations are recomputed: (x + 1)^2 has the gradient 4, not 6, at 2. Here the
    bias is such a write, and GELU has the derivative at the product without it."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.gelu.forward = lambda x, up=block.up: self.gelu(x, up.bias)

    @staticmethod
    def gelu(x: Tensor, bias: Tensor) -> Tensor:
        before = x - bias.detach().to(x.dtype)
        return F.gelu(x).detach() + F.gelu(before) - F.gelu(before).detach()


@PRECISION.plants("X-GenGroup/Flow-Factory/pull/186", GPT_ADAMW, "bf16", fair="later steps", also="pytorch#120376")
class StaleCasts(Amp):
    """One autocast around the whole loop keeps the casts of the first step: the weights move, and nobody sees it."""

    casts: dict[str, Tensor] | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.casts is None:
            self.casts = cast_weights(self.model, self.compute_dtype)
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            output = functional_call(self.model, self.casts, (x,), tie_weights=False)
            self.loss = self.task.loss_fn(output, y)
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()


def cast_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the weights that autocast casts, and keeps: the weights of linear layers."""
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    named = {f"{name}.{part}": p for name, module in linears for part, p in module.named_parameters()}
    return {name: p.to(dtype) for name, p in named.items()}


@PRECISION.plants(
    "pytorch/pytorch/issues/105211",
    GPT,
    "bf16",
    fair="gradient missing",
    also="pytorch#112583, pytorch#65766, apex#132",
)
class CastsWithoutGradient(Amp):
    """A forward pass without gradients, in the same autocast, leaves casts in its cache that pass none. torch 2.15 has
    mended it, so the cache is made by hand."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            casts = cast_weights(self.model, self.compute_dtype)
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            output = functional_call(self.model, casts, (x,), tie_weights=False)
            self.loss = self.task.loss_fn(output, y)
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()


@PRECISION.plants(
    "huggingface/transformers/pull/29285",
    LLAMA_LONG,
    "bf16",
    fair="forward pass, attention",
    also="gpt-neox#1016, transformers#29496, Megatron-LM#535, sglang-jax#1472, UNI-D2#6",
)
class PositionsInBf16(layers.Patched):
    """Rotary angles are computed in bf16, in which position 257 is 256."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.attention.rotation = self.rotation

    def rotation(self, length: int, q: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = networks.rotation(length, q.shape[-1], self.compute_dtype)
        return cos.float(), sin.float()


@PRECISION.plants("ROCm/aiter/issues/5151", LLAMA, "bf16", fair="normalization, forward pass")
class StreamTruncated(layers.Patched):
    """The norm that also adds to the stream of residuals cuts that off to bf16, always toward 0."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:

            def forward(x: Tensor, block: Any = block) -> Tensor:
                x = truncated(x + block.attention(block.norm1(x)))
                return truncated(x + block.down(block.activation(block.up(block.norm2(x)))))

            block.forward = forward


@PRECISION.plants(
    "tenstorrent/tt-metal/pull/27171", MLP, "bf16", fair="forward pass, products, precision", also="diffgemma#18"
)
class CopiesTruncated(MasterWeights):
    """fp32 becomes bf16 by cutting off: the weights in which the network computes are all a bit too small."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.truncate()

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        self.truncate()

    def truncate(self) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(truncated(self.masters[name].detach()))
