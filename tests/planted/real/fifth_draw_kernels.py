"""Real bugs of the fifth draw in kernels: convolutions, pooling, embeddings, a linear layer, experts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.real.fifth_draw_networks import Experts
from planted.real.fifth_draw_settings import EXPERTS, GROUP_NORM, GROUPED, POOLING, VIT
from planted.real.registry import Theme
from planted.real.settings import GPT, MLP
from torch import Tensor, nn

CONVOLUTIONS, EMBEDDINGS = Theme("convolutions", draw=5), Theme("embeddings", draw=5)
PRECISION = Theme("precision", draw=5)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, down: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.down = down
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, ctx.down(grad), None


def through(y: Tensor, x: Tensor, down: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns ``y``, whose gradient g goes to ``x`` as ``down(g)``; what y depends on gets g, as ever."""
    return _Through.apply(y, x, down)  # type: ignore[no-any-return]


@CONVOLUTIONS.plants("flagos-ai/FlagGems/pull/1576", GROUP_NORM, "bf16", fair="input gradient", also="backpack#30")
class RemainderOfTheStride(layers.Patched):
    """The input gradient of a convolution with a stride has a row and a column too few where the stride does not divide
    the input, and lies in the buffer of the right size as if it had them. The thread says that its indices are off, and
    this is how they are read here."""

    def patch(self, model: Any) -> None:
        conv = model[3]
        conv.forward = lambda x: through(conv._conv_forward(x.detach(), conv.weight, conv.bias), x, down_of(x, conv))


def down_of(x: Tensor, conv: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    def down(grad: Tensor) -> Tensor:
        weight = conv.weight.detach().to(grad.dtype)
        small = F.conv_transpose2d(grad, weight, stride=conv.stride, padding=conv.padding).flatten(2)  # type: ignore[arg-type]
        wrong = torch.zeros_like(x).flatten(2)
        wrong[..., : small.shape[-1]] = small
        return wrong.view_as(x)

    return down


@CONVOLUTIONS.plants(
    "pytorch/pytorch/issues/51430", GROUPED, "bf16", fair="products, gradient transposed", also="burn#1891"
)
class ChannelsOfOtherGroups(layers.Patched):
    """The weight gradient of a convolution with groups, as torch.nn.grad computed it, pairs channels of different
    groups."""

    def patch(self, model: Any) -> None:
        conv = model[2]
        conv.forward = lambda x: through(
            conv._conv_forward(x, conv.weight.detach(), conv.bias),
            conv.weight,
            lambda grad: weight_gradient(x.detach().to(grad.dtype), grad, conv).float(),
        )


def weight_gradient(x: Tensor, grad: Tensor, conv: nn.Conv2d) -> Tensor:
    """Returns the sum over images and places of each channel of ``x`` times channels of ``grad``: those that come next
    when all of them are repeated, which are the right ones where there is one group."""
    images, of_group = len(x), conv.in_channels // conv.groups
    repeated = grad.repeat(1, of_group, 1, 1).flatten(0, 1).unsqueeze(1)
    together = F.conv2d(
        x.reshape(1, -1, *x.shape[2:]), repeated, stride=conv.dilation, padding=conv.padding,
        dilation=conv.stride, groups=images * conv.in_channels,
    )  # fmt: skip
    summed = together.view(images, of_group, conv.out_channels, *together.shape[2:]).sum(0).transpose(0, 1)
    return summed[..., : conv.kernel_size[0], : conv.kernel_size[1]]


@CONVOLUTIONS.plants(
    "FluxML/NNlib.jl/issues/205", POOLING, "bf16", fair="input gradient",
    also="Flux.jl#1197, ocannl#512, CS231n-assignment2019#19, tangermeme#95",
)  # fmt: skip
class LastWindowWins(layers.Patched):
    """In the backward pass of max pooling a pixel that is the largest of several windows gets the gradient of the last
    of them, and not the sum."""

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.MaxPool2d):
                module.forward = self.pooled  # type: ignore[method-assign]

    def pooled(self, x: Tensor) -> Tensor:
        y, places = F.max_pool2d(x.detach(), 3, 2, 1, return_indices=True)

        def down(grad: Tensor) -> Tensor:
            wrong = torch.zeros_like(x).flatten(2)
            for number in range(places.shape[2] * places.shape[3]):
                place = places.flatten(2)[..., number : number + 1]
                wrong.scatter_(2, place, grad.flatten(2)[..., number : number + 1])
            return wrong.view_as(x)

        return through(y, x, down)


@EMBEDDINGS.plants("pytorch/pytorch/issues/1528", GPT, "bf16", fair="embedding", also="tt-metal#6232, eshkol#392")
class LastCopyWins(layers.Patched):
    """The gradient of a row that is looked up several times is that of the last copy, and not the sum."""

    def patch(self, model: Any) -> None:
        model.embedding.forward = lambda ids: self.rows(ids, model.embedding.weight)

    def rows(self, ids: Tensor, weight: Tensor) -> Tensor:
        def down(grad: Tensor) -> Tensor:
            wrong = torch.zeros_like(weight)
            for token, g in zip(ids.flatten().tolist(), grad.flatten(0, 1), strict=True):
                wrong[token] = g
            return wrong

        return through(F.embedding(ids, weight.detach()), weight, down)


@EMBEDDINGS.plants(
    "labmlai/annotated_deep_learning_paper_implementations/pull/221", VIT, "bf16",
    fair="forward pass, embedding, gradient missing, input gradient",
    name="labml#221",
)  # fmt: skip
class ClassTokenWithoutPosition(layers.Patched):
    """Positions are added to the patches, beginning with the first, before the class token is put in front of them."""

    def patch(self, model: Any) -> None:
        patches = model.patches

        def forward(x: Tensor) -> Tensor:
            placed = patches.patch(x).flatten(2).transpose(1, 2) + patches.positions[:, :16]
            return torch.cat([patches.token.expand(len(x), -1, -1), placed], dim=1)

        patches.forward = forward


class _Linear(torch.autograd.Function):
    """A linear layer in bf16, whose backward pass is one in fp16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, weight = (t.half() for t in ctx.saved_tensors)
        grad = grad.half()
        return (grad @ weight).bfloat16(), (grad.t() @ x).float(), grad.sum(0).float()


@PRECISION.plants(
    "pytorch/pytorch/issues/87979", MLP, "bf16", fair="precision, underflow, products, input gradient",
    also="pytorch#88029",
)  # fmt: skip
class BackwardInFp16(layers.Patched):
    """In autocast to bf16 the backward pass of functions under ``custom_bwd`` is autocast to fp16. Here the functions
    are the linear layers."""

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, module=module: _Linear.apply(  # type: ignore[method-assign]
                    x.to(self.compute_dtype), module.weight, module.bias
                )


@PRECISION.plants(
    "ViperEkura/AstrAI/pull/57", EXPERTS, "bf16", fair="precision, forward pass, rounding", also="OpenMythos#41"
)
class RoutedInBf16(layers.Patched):
    """The probabilities of experts are cast to bf16 before the two largest are chosen: near ones become equal."""

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, Experts):
                right = module.shares
                module.shares = lambda p, right=right: right(p.to(self.compute_dtype))  # type: ignore[method-assign]
