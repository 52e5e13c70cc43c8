"""Real bugs of the fifth draw in losses; and two losses that look wrong and are right."""

from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.real.fifth_draw_networks import Cap
from planted.real.fifth_draw_settings import (
    CAPPED,
    CLASS_WEIGHTS,
    CNN_FOCAL,
    GATED,
    GATED_WEIGHTED,
    MLP_BY_CLASS,
    MLP_FOCAL,
    MLP_SMOOTHED,
    SMOOTHING,
    focal,
    rows_of,
    weight_of,
    weighted,
)
from planted.real.registry import CORRECT, Theme
from planted.real.settings import MLP
from planted.real.third_draw_step import OwnLoss
from torch import Tensor

LOSS, RIGHT = Theme("loss", draw=5), Theme(CORRECT, draw=5)


class _LogSoftmax(torch.autograd.Function):
    """log softmax y, whose gradient is ``g - sum(g y)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.log_softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return grad - (grad * y).sum(-1, keepdim=True)


@LOSS.plants("uxlfoundation/oneDNN/issues/616", MLP, "bf16", fair="loss, input gradient", also="MIOpen#112")
class GradientOfAnotherSoftmax(OwnLoss):
    """The backward pass of log softmax y is ``g - sum(g y)``, and not ``g - exp(y) sum(g)``."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(_LogSoftmax.apply(output.float()), y)


class _CrossEntropy(torch.autograd.Function):
    """The mean over rows of weight times cross-entropy; backward multiplies all rows by ``factor(g, weights)``."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, y: Tensor, weights: Tensor, factor: Any) -> Tensor:
        ctx.save_for_backward(output, y, weights)
        ctx.factor = factor
        return (weights * F.cross_entropy(output.float(), y, reduction="none")).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        output, y, weights = ctx.saved_tensors
        difference = (output.float().softmax(-1) - F.one_hot(y, output.shape[-1])) / len(y)
        return (difference * ctx.factor(grad, weights)).to(output.dtype), None, None, None


@LOSS.plants(
    "SeanNaren/warp-ctc/pull/170", MLP, "fp16", fair="loss, gradient scaled, loss scale, underflow",
    also="pytorch#21961, stable-dreamfusion#158, torchtitan#3250",
)  # fmt: skip
class ScaleNotInBackward(OwnLoss):
    """The loss computes its gradient beforehand and returns it whatever gradient arrives: the loss scale is lost. There
    it is CTC."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        return _CrossEntropy.apply(output, y, torch.ones(len(y)), lambda grad, weights: 1.0)  # type: ignore[no-any-return]


@LOSS.plants("linkedin/Liger-Kernel/pull/1298", GATED_WEIGHTED, "bf16", fair="loss, input gradient")
class WeightOfTheFirstToken(OwnLoss):
    """The fused cross-entropy of each token reads one number of the gradient that arrives: all tokens have the weight
    of the first."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        rows = output.flatten(0, -2), y.flatten(), weight_of(y.flatten())
        return _CrossEntropy.apply(*rows, lambda grad, weights: grad * weights[0])  # type: ignore[no-any-return]


@LOSS.plants("EleutherAI/bergson/pull/344", GATED_WEIGHTED, "bf16", fair="loss, gradient scaled")
class DividedByOneRow(OwnLoss):
    """With weights the sum over all tokens of the batch is divided by the length of one row."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        return weighted(output, y) * len(y)


@LOSS.plants("TimDettmers/ConvE/issues/55", MLP_SMOOTHED, "bf16", fair="loss, input gradient")
class SmoothedByOne(OwnLoss):
    """Smoothed labels have 1 / n added to each class, and not smoothing / n."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        logits, y = rows_of(output, y)
        classes = logits.shape[-1]
        return F.cross_entropy(logits, (1 - SMOOTHING) * F.one_hot(y, classes) + 1 / classes)


@LOSS.plants("clcarwin/focal_loss_pytorch/issues/5", CNN_FOCAL, "bf16", fair="loss, input gradient")
class FactorIsAConstant(OwnLoss):
    """No gradient goes through the factor ``(1 - p)^2`` of the focal loss."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        log_p = -F.cross_entropy(*rows_of(output, y), reduction="none")
        return (-((1 - log_p.detach().exp()) ** 2) * log_p).mean()


@LOSS.plants("davisking/dlib/pull/2552", MLP_FOCAL, "bf16", fair="loss")
class ValueWithoutTheFactor(OwnLoss):
    """The gradient is that of the focal loss, and its value that of the cross-entropy."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        right = focal(output, y)
        return F.cross_entropy(*rows_of(output, y)).detach() + (right - right.detach())


@LOSS.plants("allenai/OLMo-core/pull/702", GATED, "bf16", fair="loss, input gradient")
class ZLossNotAskedFor(OwnLoss):
    """The fused cross-entropy adds 1e-4 times the mean square of the logarithms of the sums, which nobody asked for."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        logits, y = rows_of(output, y)
        return F.cross_entropy(logits, y) + 1e-4 * logits.logsumexp(-1).square().mean()


@LOSS.plants("unslothai/unsloth-zoo/pull/593", CAPPED, "bf16", fair="loss, forward pass")
class CapTimesTheLogit(layers.Patched):
    """Capped logits are ``x tanh(x / 30)``, and not ``30 tanh(x / 30)``."""

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, Cap):
                module.forward = lambda x: x * torch.tanh(x / 30)  # type: ignore[method-assign]


@RIGHT.plants("pytorch/pytorch/issues/61309", MLP_BY_CLASS, "bf16", also="pytorch#25571, pytorch#50528, pytorch#8062")
class DividedByTheWeights(OwnLoss):
    """The cross-entropy of weighted classes is divided by the sum of the weights, and not by the number of rows: that
    is how it is meant."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        logits, y = rows_of(output, y)
        weights = CLASS_WEIGHTS.to(logits)[y]
        return -(weights * logits.log_softmax(-1).gather(-1, y[:, None])[:, 0]).sum() / weights.sum()


@RIGHT.plants("pytorch/pytorch/issues/148884", MLP_SMOOTHED, "bf16")
class SmoothedInAllClasses(OwnLoss):
    """Smoothed labels give a part of the smoothing to the true class, too, as the paper has it: it has
    1 - smoothing + smoothing / n."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        logits, y = rows_of(output, y)
        classes = logits.shape[-1]
        targets = (1 - SMOOTHING) * F.one_hot(y, classes) + SMOOTHING / classes
        return -(targets * logits.log_softmax(-1)).sum(-1).mean()
