"""Backward methods that are not the derivative of their forward methods."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watch.second_draw.networks import images, rows, tokens
from watch.second_draw.registry import DEFECT, FACT, Training, bf16, plainly
from watch.third_draw.registry import bug

Function = torch.autograd.Function


class Apply(nn.Module):
    """A function without other arguments, as a layer."""

    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.function.apply(x)
        return output


class Isrlu(Function):
    """The inverse square root linear unit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.root = torch.rsqrt(1 + x.clamp(max=0) ** 2)
        return x * ctx.root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.root**3 * grad


class IsrluWrong(Isrlu):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.root**3


@bug(
    "pytorch/pytorch#4355",
    "the backward method of an activation leaves out the gradient that arrives",
    fair="input gradient, forward pass, gradients, gradient scaled",
    kind=DEFECT,
    precision="bf16",
)
def isrlu_without_grad(wrong: bool) -> Training:
    model = nn.Sequential(nn.Linear(20, 64), Apply(IsrluWrong if wrong else Isrlu), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, rows))


class Clip(Function):
    """Clips to 0 and 1, and passes a small part of the gradient outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.where((x >= 0) & (x <= 1), 1.0, 0.01) * grad


class ClipWrong(Clip):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.where((x >= 0) & (x <= 1), 0.01, 1.0) * grad


@bug(
    "necla-ml/Diff-JPEG#2",
    "the backward method of a clipping has its condition reversed: the gradient inside is made small, and not the one "
    "outside",
    fair="input gradient, forward pass, gradients, gradient scaled",
    kind=DEFECT,
    precision="bf16",
)
def clipping_reversed(wrong: bool) -> Training:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))
    model.append(Apply(ClipWrong if wrong else Clip))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x = images()[0].sigmoid()
            with bf16():
                out = model(x + 0.1 * torch.randn_like(x))
            optimizer.zero_grad()
            F.mse_loss(out.float(), x).backward()
            optimizer.step()

    return Training(model, optimizer, train)


class FakeQuant(Function):
    """Rounds to 16 levels, and passes the gradient straight through, within the range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        level = torch.round(x / 0.05)
        ctx.save_for_backward((level >= -8) & (level <= 7))
        return level.clamp(-8, 7) * 0.05

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0]


class FakeQuantWrong(FakeQuant):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Quantized(nn.Module):
    def __init__(self, quant: type[Function]) -> None:
        super().__init__()
        self.quant, self.first, self.last = quant, nn.Linear(20, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(F.linear(x, self.quant.apply(self.first.weight * 3), self.first.bias))
        output: Tensor = self.last(x)
        return output


@bug(
    "microsoft/nni#3159",
    "a rounding of weights passes the gradient straight through, even of those that its range cuts off",
    fair="input gradient, weights, gradients",
    kind=FACT,
    precision="bf16",
)
def passes_all(wrong: bool) -> Training:
    model = Quantized(FakeQuantWrong if wrong else FakeQuant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    return Training(model, optimizer, plainly(model, optimizer, rows))


class Swish(Function):
    """A swish that keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.mul(x.sigmoid())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s * (1 + x * (1 - s)))


class SwishWrong(Swish):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.mul_(x.sigmoid())


@bug(
    "huggingface/pytorch-image-models#156",
    "a swish writes its output over the input that it keeps for backward",
    fair="input gradient, forward pass, gradients",
    kind=DEFECT,
    precision="bf16",
)
def overwrites_input(wrong: bool) -> Training:
    swish = Apply(SwishWrong if wrong else Swish)
    first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
    model = nn.Sequential(first, swish, second, nn.BatchNorm2d(32), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    return Training(model, optimizer, plainly(model, optimizer, images))


class Exponential(Function):
    """The exponential, which keeps its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0]


class SwiGlu(Function):
    """The product of a swish and a gate."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        s = a.sigmoid()
        return grad * b * s * (1 + a * (1 - s)), grad * a * s


class SwiGluWrong(SwiGlu):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        of_a, of_b = SwiGlu.backward(ctx, grad)
        return a.data.copy_(of_a), b.data.copy_(of_b)  # as a kernel writes, which torch does not notice


class Gated(nn.Module):
    def __init__(self, swiglu: type[Function]) -> None:
        super().__init__()
        self.swiglu = swiglu
        self.up, self.gate, self.down = nn.Linear(20, 64), nn.Linear(20, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.swiglu.apply(Exponential.apply(self.up(x)), self.gate(x)))
        return output


@bug(
    "linkedin/Liger-Kernel#254",
    "the backward method of SwiGLU writes gradients over what it kept, which the function before it has kept, too",
    fair="input gradient, forward pass, gradients",
    kind=DEFECT,
    precision="bf16",
)
def overwrites_kept(wrong: bool) -> Training:
    model = Gated(SwiGluWrong if wrong else SwiGlu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, rows))


class RMSNormOf(Function):
    """An RMS norm and its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = x.float()
        root = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(y * root, root, weight)
        return (y * root * weight).to(x.dtype)

    @staticmethod
    def of_input(ctx: Any, grad: Tensor) -> Tensor:
        normal, root, weight = ctx.saved_tensors
        g = grad.float() * weight
        return ((g - normal * (g * normal).mean(-1, keepdim=True)) * root).to(grad.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        of_weight = (grad.float() * ctx.saved_tensors[0]).flatten(0, -2).sum(0)
        return RMSNormOf.of_input(ctx, grad), of_weight


class RMSNormFrozen(RMSNormOf):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        return RMSNormOf.of_input(ctx, grad), None


class RMSNormStrided(RMSNormOf):
    """Reads the gradient by the strides of the output, as a kernel does that is given only the pointer."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        of_output = torch.empty(grad.shape).stride()
        return RMSNormOf.backward(ctx, grad.as_strided(grad.shape, of_output, grad.storage_offset()))


class Normed(nn.Module):
    """A norm of one's own. ``turned``: the next layer works across the other dimension."""

    def __init__(self, norm: type[RMSNormOf], turned: bool = False) -> None:
        super().__init__()
        self.norm, self.turned = norm, turned
        self.tok, self.weight = nn.Embedding(64, 32), nn.Parameter(torch.ones(32))
        self.inner, self.mix, self.head = nn.Linear(32, 32), nn.Linear(16, 16), nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm.apply(self.inner(self.tok(ids)), self.weight)
        if self.turned:
            x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        output: Tensor = self.head(F.gelu(x))
        return output


@bug(
    "unslothai/unsloth#4533",
    "the backward method of an RMS norm returns no gradient for its weight, which is never trained",
    fair="gradient missing, forward pass, normalization",
    kind=DEFECT,
    precision="bf16",
    expect={"without_gradient": []},
)
def weight_without_gradient(wrong: bool) -> Training:
    model = Normed(RMSNormFrozen if wrong else RMSNormOf)
    model.mix = nn.Identity()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, tokens))


@bug(
    "flagos-ai/FlagGems#1082",
    "the backward method of an RMS norm reads a transposed gradient as if it lay in the order of the output",
    fair="normalization, input gradient, gradient transposed, forward pass",
    kind=DEFECT,
    precision="bf16",
)
def reads_transposed(wrong: bool) -> Training:
    model = Normed(RMSNormStrided if wrong else RMSNormOf, turned=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, tokens))
