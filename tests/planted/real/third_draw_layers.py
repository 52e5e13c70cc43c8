"""Real bugs of the third draw in layers: norms, their statistics, activations, dropout, embeddings and attention; and a
linear layer that looks wrong and is right."""

from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.real.norms import WRONG, norms_of
from planted.real.registry import CORRECT, Theme
from planted.real.second_draw_layers import OwnAttention, batch_norm_of, moves_statistics
from planted.real.second_draw_settings import BATCH_NORM_BF16
from planted.real.settings import LLAMA, MLP
from planted.real.third_draw_settings import BATCH_NORM_EPS, CONV, GPT_DROPOUT, GPT_QUICK, QuickGelu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NORMS, BUFFERS = Theme("norms", draw=3), Theme("buffers", draw=3)
PRECISION, RIGHT = Theme("precision", draw=3), Theme(CORRECT, draw=3)


class _PreNorm(torch.autograd.Function):
    """RMSNorm and the stream that it norms; the stream's own gradient goes through the norm, too."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(stream, weight)
        ctx.eps = eps
        return torch.rms_norm(stream, weight.shape, weight, eps), stream.view_as(stream)

    @staticmethod
    def backward(ctx: Any, normed: Tensor, stream: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            output = torch.rms_norm(x, weight.shape, weight, ctx.eps)
        (gain,) = torch.autograd.grad(output, weight, normed, retain_graph=True)
        (down,) = torch.autograd.grad(output, x, normed + stream)
        return down, gain, None


@NORMS.plants("Dao-AILab/quack/pull/53", LLAMA, "bf16", fair=f"{WRONG}, input gradient")
class StreamThroughTheNorm(layers.Patched):
    """The norm that also adds to the stream of residuals sends the stream's gradient through the norm, to which it
    should be added after it."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:

            def forward(x: Tensor, block: Any = block) -> Tensor:
                stream = x + block.attention(block.norm1(x))
                norm = block.norm2
                normed, stream = _PreNorm.apply(stream, norm.weight, norm.eps)
                return stream + block.down(block.activation(block.up(normed)))  # type: ignore[no-any-return]

            block.forward = forward


class _RmsNorm(torch.autograd.Function):
    """RMSNorm in fp32; the gradient through the mean of squares has the weight as a factor twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return x * inverse * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        along = (grad * x * weight).mean(-1, keepdim=True)
        dx = grad * weight * inverse - weight * inverse**3 * x * along
        return dx, (grad * x * inverse).sum(tuple(range(grad.dim() - 1))), None


@NORMS.plants("NVIDIA/Megatron-LM/pull/6859", LLAMA, "bf16", fair=f"{WRONG}, input gradient")
class WeightTwiceInTheNorm(layers.Patched):
    """The input gradient of RMSNorm multiplies the term of the variance by the weight twice, which shows when gains
    have moved from 1."""

    def patch(self, model: Any) -> None:
        for norm in norms_of(model):
            norm.forward = lambda x, norm=norm: _RmsNorm.apply(x.float(), norm.weight, norm.eps)


@BUFFERS.plants(
    "pytorch/pytorch/issues/96136",
    BATCH_NORM_BF16,
    "bf16",
    fair="running statistics, buffers",
    also="pytorch#62471, YOLO-Master#262, pytorch-pfn-extras#117, efficient_densenet_pytorch#73, insightface#2053",
)
class StatisticsTwice(layers.Patched):
    """Activations are recomputed in backward, and running statistics are updated once more."""

    def patch(self, model: Any) -> None:
        right = model.forward
        model.forward = lambda x: checkpoint(right, x, use_reentrant=False)


@BUFFERS.plants(
    "nntrainer/nntrainer/pull/677", BATCH_NORM_EPS, "bf16", fair="running statistics, buffers, eps", also="chainer#4505"
)
class EpsInTheStatistics(layers.Patched):
    """eps is added to the variance before that goes into the running one."""

    def patch(self, model: Any) -> None:
        moves_statistics(batch_norm_of(model), lambda norm, *_: norm.running_var.data.add_(norm.momentum * norm.eps))


@PRECISION.plants(
    "allenai/OLMo-core/pull/828",
    GPT_DROPOUT,
    "bf16",
    fair="dropout, input gradient",
    also="guided-diffusion#167, PIDM#66, OLMo#702, pytorch#190717, pytorch#190758",
)
class OtherMasksInBackward(layers.Patched):
    """Activations are recomputed without the state of the generator, so that dropout draws other masks in backward."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.forward = lambda x, run=block.forward: checkpoint(
                run, x, use_reentrant=False, preserve_rng_state=False
            )


class _QuickGelu(torch.autograd.Function):
    """``x sigmoid(1.702 x)`` with the derivative of the GELU that is written with tanh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = F.gelu(x, approximate="tanh")
        return torch.autograd.grad(output, x, grad)[0]


@PRECISION.plants("harvard-edge/cs249r_book/pull/1399", GPT_QUICK, "bf16", fair="input gradient, forward pass")
class DerivativeOfTheOtherGelu(layers.Patched):
    """Forward computes GELU with a sigmoid, backward the derivative of the one with tanh."""

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, QuickGelu):
                module.forward = _QuickGelu.apply  # type: ignore[method-assign]


class _Bias(torch.autograd.Function):
    """Passes the output of a convolution on; the gradient of its bias is a running sum in 16 bits over the places of an
    image, and then over the images."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        places = grad.flatten(2).permute(2, 0, 1).flatten(1)  # [places, images x channels]
        of_images = layers.running_sum(places, grad.dtype).view(grad.shape[:2])
        return grad, layers.running_sum(of_images, grad.dtype).float()


@PRECISION.plants("pytorch/pytorch/issues/68048", CONV, "bf16", fair="products, precision, rounding")
class BiasSummedInBf16(layers.Patched):
    """The gradient of a convolution's bias is summed in bf16, number after number: 1600 ones are 256."""

    def patch(self, model: Any) -> None:
        conv = model[0]
        right = conv._conv_forward
        conv.forward = lambda x: _Bias.apply(right(x, conv.weight, conv.bias.detach()), conv.bias)


@PRECISION.plants(
    "tenstorrent/tt-metal/pull/53386",
    LLAMA,
    "bf16",
    fair="products, precision, rounding",
    also="tt-metal#36341",
)
class TokensSummedInBf16(layers.EmbeddingSummedIn16Bits):
    """The gradients of a token that occurs often are added one after another in bf16."""


@PRECISION.plants("huggingface/transformers/issues/26451", LLAMA, "bf16", fair="precision, attention, forward pass")
class AttentionInFp16(OwnAttention):
    """Queries, keys and values that norms and angles have left in fp32 are cast to fp16, in training with bf16."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q.half(), k.half(), v.half(), is_causal=True)


@RIGHT.plants("pytorch/pytorch/issues/115144", MLP, "bf16")
class BiasAfterTheRounding(layers.Patched):
    """A product is rounded to bf16 before the bias is added, and the sum once more: one rounding more."""

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, module=module: self.linear(x, module)  # type: ignore[method-assign]

    def linear(self, x: Tensor, module: nn.Linear) -> Tensor:
        return F.linear(x, module.weight) + module.bias.to(self.compute_dtype)
