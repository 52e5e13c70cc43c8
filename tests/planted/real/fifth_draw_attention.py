"""Real bugs of the fifth draw in attention, its softmax and its residual; and an ALiBi that looks wrong and
is right."""

from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.real.fifth_draw_networks import PlainAttention
from planted.real.fifth_draw_settings import BIASED, GATED, GPT_ATTENTION_DROPOUT, WIDE_VALUES
from planted.real.registry import CORRECT, Theme
from planted.real.second_draw_layers import OwnAttention, masked
from planted.real.settings import GPT
from torch import Tensor

ATTENTION, RIGHT = Theme("attention", draw=5), Theme(CORRECT, draw=5)
BACKWARD = "attention, input gradient"


class _Attention(torch.autograd.Function):
    """Causal attention of 16-bit numbers, computed in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = masked(q.float() @ k.float().mT * q.shape[-1] ** -0.5)
        output = scores.softmax(-1) @ v.float()
        ctx.save_for_backward(q, k, v, scores.logsumexp(-1, keepdim=True), output)
        return output.to(v.dtype)


class _NotMasked(_Attention):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v, log_sum, output = (t.float() for t in ctx.saved_tensors)
        scale, grad = q.shape[-1] ** -0.5, grad.float()
        p = (q @ k.mT * scale - log_sum).exp()
        ds = p * (grad @ v.mT - (grad * output).sum(-1, keepdim=True)) * scale
        return tuple(t.to(ctx.saved_tensors[0].dtype) for t in (ds @ k, ds.mT @ q, p.mT @ grad))


class _FirstChannels(_Attention):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v, log_sum, output = (t.float() for t in ctx.saved_tensors)
        scale, grad, first = q.shape[-1] ** -0.5, grad.float(), slice(0, q.shape[-1])
        p = (masked(q @ k.mT * scale) - log_sum).exp()
        along = (grad * output).sum(-1, keepdim=True)
        of_q, of_k = (p * (dp - along) * scale for dp in (grad[..., first] @ v[..., first].mT, grad @ v.mT))
        return tuple(t.to(ctx.saved_tensors[0].dtype) for t in (of_q @ k, of_k.mT @ q, p.mT @ grad))


@ATTENTION.plants("triton-lang/triton/issues/7216", GATED, "fp16", fair=BACKWARD)
class NotMaskedInBackward(OwnAttention):
    """The backward pass of the fused attention does not apply the causal mask."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return _NotMasked.apply(*(t.to(self.compute_dtype) for t in (q, k, v)))  # type: ignore[no-any-return]


@ATTENTION.plants("XunhaoLai/native-sparse-attention-triton/issues/27", WIDE_VALUES, "bf16", fair=BACKWARD)
class ChannelsOfValuesLeftOut(layers.Patched):
    """The gradient of queries reads as many channels of the values as queries have, where values have more."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.attention.mix = self.mix

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return _FirstChannels.apply(q, k, v)  # type: ignore[no-any-return]


@ATTENTION.plants(
    "huggingface/transformers/issues/48745", GPT, "bf16", fair="attention, forward pass",
    also="keras#23038, entrenar#310, xformers#103, MoLA#21",
)  # fmt: skip
class SeesLaterTokens(layers.Patched):
    """Attention has lost its causal mask: each token sees the ones after it, and so its label."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.attention.forward = lambda x, own=block.attention: PlainAttention.forward(own, x)


@ATTENTION.plants(
    "huggingface/candle/issues/3568", GATED, "bf16", fair=f"{BACKWARD}, gradient missing",
    also="candle#3612, candle#3591",
)  # fmt: skip
class RotationHasNoBackward(OwnAttention):
    """The fused rotation of queries and keys has no backward pass: no gradient comes down to them."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        return F.scaled_dot_product_attention(q.detach(), k.detach(), v.to(q.dtype), is_causal=True)


@ATTENTION.plants("bkitano/llama-from-scratch/issues/8", GATED, "bf16", fair="attention, forward pass")
class AnglesOneStepOn(layers.Patched):
    """The exponent of a pair's frequency is -2 (i - 1) / d, where i counts from 0: all angles are too large by one
    step."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.attention.rotation = self.rotation

    def rotation(self, length: int, q: Tensor) -> tuple[Tensor, Tensor]:
        channels = q.shape[-1]
        exponents = (torch.arange(0, channels, 2, dtype=torch.float64) - 2) / channels
        angles = torch.arange(length, dtype=torch.float64)[:, None] * 10000.0**-exponents
        angles = torch.cat([angles, angles], dim=-1)
        dtype = torch.promote_types(q.dtype, torch.float32)
        return angles.cos().to(dtype), angles.sin().to(dtype)


@ATTENTION.plants(
    "paiml/entrenar/issues/313", GATED, "bf16", fair="input gradient, gradient missing", also="Fuser#2922, quack#52"
)
class SecondResidualHasNoGradient(layers.Patched):
    """What goes down beside the second part of each block is not added to the gradient."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:

            def forward(x: Tensor, block: Any = block) -> Tensor:
                x = x + block.attention(block.norm1(x))
                return x.detach() + block.down(block.activation(block.up(block.norm2(x))))  # type: ignore[no-any-return]

            block.forward = forward


class _Softmax(torch.autograd.Function):
    """Softmax whose gradient is p times the one that arrives."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        p = scores.softmax(-1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (p,) = ctx.saved_tensors
        return grad * p


@ATTENTION.plants(
    "HomericIntelligence/Odyssey/issues/2134", GATED, "bf16", fair=BACKWARD,
    also="darknet#96, mobula#3, fromscratchtoml#65",
)  # fmt: skip
class SoftmaxWithoutTheSum(OwnAttention):
    """The backward pass of softmax leaves out the sum of the gradients times the probabilities."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        scores = masked((q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5)
        return _Softmax.apply(scores) @ v  # type: ignore[no-any-return]


class _DroppedSoftmax(torch.autograd.Function):
    """Softmax of which some is dropped; backward takes what is left for the softmax, and does not drop gradients."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, kept: Tensor) -> Tensor:
        dropped = scores.softmax(-1) * kept
        ctx.save_for_backward(dropped)
        return dropped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (dropped,) = ctx.saved_tensors
        return dropped * (grad - (grad * dropped).sum(-1, keepdim=True)), None


@ATTENTION.plants(
    "aws-neuron/nki-samples/pull/81", GPT_ATTENTION_DROPOUT, "bf16", fair=f"{BACKWARD}, dropout", also="AiDotNet#1701"
)
class DropoutNotInBackward(layers.Patched):
    """The backward pass of attention computes the gradient of softmax from the probabilities that dropout has left, and
    does not drop their gradients."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.attention.forward = lambda x, own=block.attention: self.attend(own, x)

    def attend(self, own: Any, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = own.qkv(x).view(n, t, 3, own.heads, width // own.heads).permute(2, 0, 3, 1, 4)
        with torch.autocast("cpu", enabled=False):
            scores = masked(q.float() @ k.float().mT * q.shape[-1] ** -0.5)
            kept = F.dropout(torch.ones_like(scores), own.p, own.training)
            mixed = (_DroppedSoftmax.apply(scores, kept) @ v.float()).to(v.dtype)
        return own.output(mixed.transpose(1, 2).reshape(n, t, width))  # type: ignore[no-any-return]


@RIGHT.plants("mosaicml/llm-foundry/issues/186", BIASED, "bf16", also="vllm#945")
class BiasByTheKeyAlone(layers.Patched):
    """ALiBi adds to a score what depends on the key's place alone, and not on its distance from the query: in a row
    that is the same number more, which softmax does not see."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.attention.distances = lambda length: torch.arange(1 - length, 1)
