"""Real bugs of the fifth draw in norms, and a batch norm that looks wrong and is right."""

from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.real.fifth_draw_settings import CNN, GATED_SMALL, GPT_ACCUMULATE, GROUP_NORM
from planted.real.norms import WRONG, norms_of
from planted.real.registry import CORRECT, Theme
from torch import Tensor, nn

from mpcompare.backends.amp import Amp

NORMS, RIGHT = Theme("norms", draw=5), Theme(CORRECT, draw=5)


class OwnNorm(layers.Patched):
    """``amp`` whose norms of one class are a formula of its own."""

    kind: type[nn.Module] = nn.BatchNorm2d

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, self.kind):
                right = module.forward
                module.forward = lambda x, norm=module, right=right: (  # type: ignore[method-assign]
                    self.normed(norm, x.float()).to(x.dtype) if norm.training else right(x)
                )

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        raise NotImplementedError


def counted(norm: Any, x: Tensor) -> Tensor:
    """Returns what a batch norm makes of a batch without its gain and bias; moves its statistics."""
    norm.num_batches_tracked += 1
    return F.batch_norm(x, norm.running_mean, norm.running_var, None, None, True, norm.momentum, norm.eps)


def of_channels(parameter: Tensor) -> Tensor:
    return parameter[:, None, None]


@NORMS.plants("facebookresearch/CrypTen/pull/143", CNN, "bf16", fair=f"{WRONG}, input gradient", also="darknet#4605")
class StatisticsAreConstants(OwnNorm):
    """The input gradient of batch norm takes mean and variance for constants, as they are in evaluation."""

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            counted(norm, x)
            variance, mean = torch.var_mean(x, (0, 2, 3), keepdim=True, correction=0)
        return (x - mean) * torch.rsqrt(variance + norm.eps) * of_channels(norm.weight) + of_channels(norm.bias)


@NORMS.plants("denizyuret/Knet.jl/issues/288", CNN, "bf16", fair=f"{WRONG}, input gradient")
class GainNotInBackward(OwnNorm):
    """The input gradient of batch norm leaves out the gain: nothing is wrong while that is 1."""

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        normed = counted(norm, x)
        scaled = normed.detach() * of_channels(norm.weight) + of_channels(norm.bias)
        return scaled + (normed - normed.detach())


class _Affine(torch.autograd.Function):
    """``normed * weight + bias``; what each image gives to their gradients is rounded to bf16, and added in fp16."""

    @staticmethod
    def forward(ctx: Any, normed: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(normed, weight)
        return normed * of_channels(weight) + of_channels(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        normed, weight = ctx.saved_tensors
        of_images = (grad * normed).sum((2, 3)), grad.sum((2, 3))
        dw, db = (layers.running_sum(part.bfloat16(), torch.float16).float() for part in of_images)
        return grad * of_channels(weight), dw, db


@NORMS.plants(
    "linkedin/Liger-Kernel/pull/1253", GROUP_NORM, "fp16", fair=f"{WRONG}, precision, products, rounding, bias sum"
)
class GroupNormThroughBf16(OwnNorm):
    """In fp16 the gradients of group norm's gain and bias are rounded to bf16 before they are added in fp16."""

    kind = nn.GroupNorm

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        return _Affine.apply(F.group_norm(x, norm.num_groups, None, None, norm.eps), norm.weight, norm.bias)  # type: ignore[no-any-return]


@NORMS.plants("paiml/aprender/pull/1606", GATED_SMALL, "bf16", fair=f"{WRONG}, eps", also="tvm#15856, cutlass#1112")
class EpsOfAnotherModel(layers.Patched):
    """The kernel of RMSNorm has LLaMA's eps of 1e-5 built in, where the network asks for 1e-6: squares of the
    activations have a mean of 4e-4."""

    def patch(self, model: Any) -> None:
        for norm in norms_of(model):
            norm.eps = 1e-5


@NORMS.plants("karpathy/llm.c/pull/408", GPT_ACCUMULATE, "bf16", fair=f"{WRONG}, accumulation, gradient missing")
class NormsDoNotAccumulate(Amp):
    """The backward pass of LayerNorm writes the gradients of gain and bias, and does not add to them: those of all
    micro-batches but the last are lost."""

    def backward(self) -> None:
        for norm in norms_of(self.model):
            norm.weight.grad = norm.bias.grad = None
        super().backward()


class _BatchNorm(torch.autograd.Function):
    """Batch norm without gain and bias, with the gradient of three terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        variance, mean = torch.var_mean(x, (0, 2, 3), keepdim=True, correction=0)
        inverse = torch.rsqrt(variance + eps)
        normed = (x - mean) * inverse
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        normed, inverse = ctx.saved_tensors
        mean, along = (t.mean((0, 2, 3), keepdim=True) for t in (grad, grad * normed))
        return (grad - mean - along * normed) * inverse, None


@RIGHT.plants("BVLC/caffe/issues/3878", CNN, "bf16", also="mxnet#1053")
class WithoutTheFourthTerm(OwnNorm):
    """The gradient of batch norm leaves out the term with the mean of what is normed, which is 0."""

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            counted(norm, x)
        return _BatchNorm.apply(x, norm.eps) * of_channels(norm.weight) + of_channels(norm.bias)  # type: ignore[no-any-return]
