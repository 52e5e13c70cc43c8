"""Real bugs of the second draw in layers: norms, their statistics, activations and attention; and three attentions that
look wrong and are right."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.real.networks import RotaryAttention, turned
from planted.real.norms import WRONG, norms_of
from planted.real.registry import CORRECT, Theme
from planted.real.second_draw_settings import BATCH_NORM_BF16, BATCH_NORM_SHIFTED, TANH
from planted.real.settings import GPT, LLAMA
from torch import Tensor, nn

NORMS, BUFFERS = Theme("norms", draw=2), Theme("buffers", draw=2)
PRECISION, RIGHT = Theme("precision", draw=2), Theme(CORRECT, draw=2)


def moves_statistics(norm: Any, move: Callable[[Any, dict[str, Tensor], Tensor], None]) -> None:
    """Lets ``move`` write to a norm's running statistics when a batch has moved them; it is given the norm, what they
    were before, and the batch. It writes through ``.data``: autograd takes note of a write to what it keeps."""
    right = norm.forward

    def forward(x: Tensor) -> Tensor:
        before = {name: getattr(norm, name).clone() for name in ("running_mean", "running_var")}
        output: Tensor = right(x)
        if norm.training:
            move(norm, before, x)
        return output

    norm.forward = forward


def batch_norm_of(model: Any) -> nn.BatchNorm1d:
    return next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))


@NORMS.plants("tenstorrent/tt-metal/pull/46159", BATCH_NORM_SHIFTED, "bf16", fair=WRONG, also="tt-metal#45968")
class VarianceOfSquares(layers.Patched):
    """Batch norm takes the variance as the mean of squares minus the square of the mean, both in bf16."""

    def patch(self, model: Any) -> None:
        norm: Any = batch_norm_of(model)
        right = norm.forward
        norm.forward = lambda x: self.normed(norm, x.to(self.compute_dtype)) if norm.training else right(x)

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        mean = x.mean(0)
        variance = x.square().mean(0) - mean.square()
        with torch.no_grad():
            unbiased = variance.float() * len(x) / (len(x) - 1)
            norm.running_mean.lerp_(mean.float(), norm.momentum)
            norm.running_var.lerp_(unbiased, norm.momentum)
            norm.num_batches_tracked += 1
        scaled = (x - mean) * torch.rsqrt(variance + norm.eps)
        return scaled * norm.weight.to(x.dtype) + norm.bias.to(x.dtype)


class _Gain(torch.autograd.Function):
    """``normed * weight``; the gradient of ``weight`` is summed in bf16 over blocks of 16 rows, and then in fp32."""

    @staticmethod
    def forward(ctx: Any, normed: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(normed, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        normed, weight = ctx.saved_tensors
        rows = (grad.bfloat16() * normed.bfloat16()).flatten(0, -2)
        rows = F.pad(rows, (0, 0, 0, -len(rows) % 16)).view(-1, 16, rows.shape[-1])
        while rows.shape[1] > 1:
            first, second = rows.chunk(2, dim=1)
            rows = first + second
        return grad * weight, rows.float().sum((0, 1))


@NORMS.plants("linkedin/Liger-Kernel/pull/950", LLAMA, "bf16", fair=WRONG, also="llm.c#476")
class GainSummedInBf16(layers.Patched):
    """The gradient of the gain of RMSNorm is summed in bf16 within a block of rows."""

    def patch(self, model: Any) -> None:
        for norm in norms_of(model):

            def forward(x: Tensor, norm: Any = norm) -> Tensor:
                return _Gain.apply(torch.rms_norm(x, norm.normalized_shape, None, norm.eps), norm.weight)  # type: ignore[no-any-return]

            norm.forward = forward


class _LayerNorm(torch.autograd.Function):
    """LayerNorm whose backward pass gets its mean and the inverse of its spread rounded to ``dtype``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        inverse = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean.to(dtype), inverse.to(dtype))
        return (x - mean) * inverse * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, mean, inverse = (t.float() for t in ctx.saved_tensors)
        normed, g = (x - mean) * inverse, grad * weight
        along = (g * normed).mean(-1, keepdim=True)
        dx = inverse * (g - g.mean(-1, keepdim=True) - normed * along)
        rows = tuple(range(grad.dim() - 1))
        return dx, (grad * normed).sum(rows), grad.sum(rows), None, None


@NORMS.plants("flagos-ai/FlagGems/pull/221", GPT, "bf16", fair=f"{WRONG}, input gradient")
class StatisticsSavedInBf16(layers.Patched):
    """LayerNorm saves mean and inverse of the spread in bf16 for the backward pass."""

    def patch(self, model: Any) -> None:
        for norm in norms_of(model):
            norm.forward = lambda x, norm=norm: _LayerNorm.apply(
                x.float(), norm.weight, norm.bias, norm.eps, self.compute_dtype
            )


@BUFFERS.plants("tenstorrent/tt-metal/issues/55438", BATCH_NORM_BF16, "bf16", fair="running statistics")
class BiasedVariance(layers.Patched):
    """The running variance is that of the batch, divided by n and not by n - 1."""

    def patch(self, model: Any) -> None:
        def move(norm: Any, before: dict[str, Tensor], x: Tensor) -> None:
            norm.running_var.data.sub_((norm.running_var - before["running_var"] * (1 - norm.momentum)) / len(x))

        moves_statistics(batch_norm_of(model), move)


class _Tanh(torch.autograd.Function):
    """tanh whose derivative ``1 - y^2`` is rounded after each operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


@PRECISION.plants(
    "intel/torch-xpu-ops/pull/3043", TANH, "bf16", fair="input gradient, forward pass, rounding", also="tt-metal#35885"
)
class TanhSquaredInBf16(layers.Patched):
    """The derivative of tanh is taken in bf16: its square is rounded before it is subtracted from 1."""

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.Tanh):
                module.forward = lambda x: _Tanh.apply(x.to(self.compute_dtype))  # type: ignore[method-assign]


class OwnAttention(layers.Patched):
    """A LLaMA whose attention is a formula of its own."""

    def patch(self, model: Any) -> None:
        for number, block in enumerate(model.blocks, 1):
            attention = block.attention
            attention.forward = lambda x, attention=attention, number=number: self.attend(attention, x, number)

    def attend(self, attention: RotaryAttention, x: Tensor, number: int) -> Tensor:
        n, t, width = x.shape
        q, k, v = attention.qkv(x).view(n, t, 3, attention.heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = attention.rotation(t, q)
        mixed = self.mix(turned(q, cos, sin), turned(k, cos, sin), v, number)
        return attention.output(mixed.transpose(1, 2).reshape(n, t, width))  # type: ignore[no-any-return]

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        """Returns ``softmax(q k^T / sqrt(d)) v``, causal; ``number`` is the block's number, 1 for the first."""
        raise NotImplementedError


def masked(scores: Tensor) -> Tensor:
    """Returns the scores ``[.., T, T]`` with -inf where a token would see a later one."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf)


@PRECISION.plants("tinygrad/tinygrad/pull/12280", LLAMA, "bf16", fair="attention, forward pass, precision")
class SoftmaxInBf16(OwnAttention):
    """The softmax of attention is computed in bf16: the difference from the largest score, its exponential, the sum."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        scores = masked((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).to(self.compute_dtype))
        exponentials = (scores - scores.amax(-1, keepdim=True)).to(self.compute_dtype).exp().to(self.compute_dtype)
        return exponentials / exponentials.sum(-1, keepdim=True).to(self.compute_dtype) @ v


@PRECISION.plants(
    "AI-Hypercomputer/maxtext/issues/3138", LLAMA, "bf16", fair="attention, forward pass", also="maxtext#1349"
)
class ScaledTwice(OwnAttention):
    """Queries are divided by sqrt(d), and so are the scores in the fused attention that they are given to."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        return F.scaled_dot_product_attention(q * q.shape[-1] ** -0.5, k, v.to(q.dtype), is_causal=True)


@RIGHT.plants("lucidrains/imagen-pytorch/issues/69", LLAMA, "bf16")
class ScaleOnBothSides(OwnAttention):
    """guided-diffusion divides queries and keys by the fourth root of d each, before their product."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        root = q.shape[-1] ** -0.25
        return F.scaled_dot_product_attention(q * root, k * root, v.to(q.dtype), is_causal=True, scale=1.0)


@RIGHT.plants("NVIDIA/Megatron-LM/pull/320", LLAMA, "fp16")
class DividedByTheLayer(OwnAttention):
    """Megatron-LM divides scores by the number of the layer before they are rounded, and multiplies by it after it."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        scores = (q / (q.shape[-1] ** 0.5 * number)) @ k.transpose(-2, -1)
        return masked(scores.float() * number).softmax(-1) @ v


@RIGHT.plants("meta-llama/llama/pull/515", LLAMA, "bf16")
class SoftmaxWithoutFloat(OwnAttention):
    """A softmax of bf16 numbers without a cast: torch computes it in fp32 all the same, and rounds the result."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        scores = masked(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5)
        with torch.autocast("cpu", enabled=False):
            weights = scores.to(self.compute_dtype).softmax(-1)
        return weights @ v
