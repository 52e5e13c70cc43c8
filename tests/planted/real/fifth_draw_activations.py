"""Real bugs of the fifth draw in activations, dropout and recomputation; and a GELU and a SwiGLU that look wrong and
are right."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.real.fifth_draw_kernels import through
from planted.real.fifth_draw_networks import Gated
from planted.real.fifth_draw_settings import GATED, TANH_GPT, TURNING
from planted.real.fourth_draw_layers import dropouts_of
from planted.real.registry import CORRECT, Theme
from planted.real.settings import GPT, GPT_ADAMW
from planted.real.third_draw_settings import GPT_DROPOUT
from torch import Tensor, nn

ACTIVATIONS, RECOMPUTATION = Theme("activations", draw=5), Theme("recomputation", draw=5)
RIGHT = Theme(CORRECT, draw=5)
MISSING = "gradient missing, unused parameter, update left out"


@ACTIVATIONS.plants("linkedin/Liger-Kernel/pull/1413", GATED, "bf16", fair="input gradient")
class GradientOfTheGateAlone(layers.Patched):
    """The input gradient of SwiGLU's first layer is a sum of two products, that of the gate and that of the other half,
    and one of them is dropped. There it is in a mixture of experts."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.up.forward = lambda x, weight=block.up.weight: torch.cat(
                [F.linear(x, weight[:128]), F.linear(x.detach(), weight[128:])], dim=-1
            )


@ACTIVATIONS.plants(
    "tenstorrent/tt-metal/pull/56387", GPT, "bf16", fair="forward pass, rounding", also="tt-metal#55130"
)
class TanhForErf(layers.Patched):
    """GELU is the one that is written with tanh, where the network asks for the exact one."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.gelu.approximate = "tanh"


@ACTIVATIONS.plants("pytorch/pytorch/issues/31938", TURNING, "bf16", fair="input gradient", also="pytorch#33639")
class SignOfTheOutput(layers.Patched):
    """A leaky ReLU in place keeps its output alone, and takes the sign of that for the sign of its input: with a
    negative slope no gradient is multiplied by it."""

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.LeakyReLU):
                module.forward = lambda x, slope=module.negative_slope: self.activated(x, slope)  # type: ignore[method-assign]

    def activated(self, x: Tensor, slope: float) -> Tensor:
        y = F.leaky_relu(x.detach(), slope)
        return through(y, x, lambda grad: torch.where(y >= 0, grad, slope * grad))


@ACTIVATIONS.plants(
    "ddbourgin/numpy-ml/issues/94", GPT_DROPOUT, "bf16", fair="dropout, input gradient", also="kaldi#3890"
)
class DroppedComeBack(layers.Patched):
    """The backward pass of dropout divides the gradient by 1 - p, and does not set to 0 what was dropped."""

    def patch(self, model: Any) -> None:
        for module in dropouts_of(model):
            module.forward = lambda x, module=module, right=module.forward: through(  # type: ignore[method-assign]
                right(x.detach()), x, lambda grad: grad / (1 - module.p)
            )


@RECOMPUTATION.plants("ooples/AiDotNet.Tensors/pull/643", GPT_ADAMW, "bf16", fair=MISSING)
class InputsOfTheSegmentAlone(layers.Patched):
    """The part that is recomputed is differentiated by its input, and not by its weights: they have no gradient."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.forward = lambda x, block=block, right=block.forward: self.recomputed(block, right, x)

    def recomputed(self, block: nn.Module, right: Any, x: Tensor) -> Tensor:
        for p in block.parameters():
            p.requires_grad_(False)
        output: Tensor = right(x)
        for p in block.parameters():
            p.requires_grad_(True)
        return output


@RECOMPUTATION.plants(
    "verl-project/verl/pull/6913", GATED, "bf16", fair=f"{MISSING}, input gradient, loss", also="candle#3613"
)
class BackboneHasNoGradient(layers.Patched):
    """The fused last layer and loss asks a view, made without gradients, whether it needs one: only the last layer is
    trained."""

    def patch(self, model: Any) -> None:
        right = model.output.forward
        model.output.forward = lambda x: right(x.detach())


@RIGHT.plants("deepspeedai/Megatron-DeepSpeed/issues/84", TANH_GPT, "bf16")
class SquareInsteadOfTheCube(layers.Patched):
    """GELU is ``x / 2 (1 + tanh(sqrt(2 / pi) x (1 + 0.044715 x^2)))``: the cube is there, with an x outside."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.gelu.forward = lambda x: self.gelu(x.float()).to(x.dtype)

    def gelu(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))


class _Gated(torch.autograd.Function):
    """SwiGLU of 16-bit numbers; SiLU, both products and both gradients are rounded."""

    @staticmethod
    def forward(ctx: Any, e: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(e, g)
        return F.silu(e.float()).to(g.dtype) * g

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        e, g = ctx.saved_tensors
        x, sigmoid = e.float(), e.float().sigmoid()
        de = (grad * g).float() * sigmoid * (1 + x * (1 - sigmoid))
        return de.to(grad.dtype), grad * (sigmoid * x).to(grad.dtype)


@RIGHT.plants("unslothai/unsloth/issues/3314", GATED, "bf16")
class BuffersAreUsedAgain(layers.Patched):
    """The kernel of SwiGLU writes each gradient into the buffer of the other operand, which looks like an exchange and
    is none; it rounds a product before it multiplies by the derivative. The kernel was read, too."""

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, Gated):
                module.forward = lambda x: _Gated.apply(*x.chunk(2, dim=-1))  # type: ignore[method-assign]
