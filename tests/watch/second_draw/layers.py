"""Layers that compute something else."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watch.second_draw.networks import MLP, rows
from watch.second_draw.registry import DEFECT, FACT, Training, bf16, bug, plainly


class Prod(torch.autograd.Function):
    """The product of the last dimension."""

    with_grad = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.prod(-1)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad[..., None] * (y[..., None] / x)


class ProdWrong(Prod):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return y[..., None] / x


class Mil(nn.Module):
    """A noisy-or over the instances of a bag."""

    def __init__(self, prod: type[Prod]) -> None:
        super().__init__()
        self.net, self.prod = MLP(20, 64, 1), prod

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.net(x).float()).squeeze(-1)
        output: Tensor = 1 - self.prod.apply(1 - p * 0.5)
        return output


@bug(
    "pytorch/pytorch#995",
    "the backward method of a product leaves out the gradient that arrives",
    fair="forward pass, input gradient, gradient scaled, loss, gradients, products",
    kind=DEFECT,
    precision="bf16",
)
def prod_without_grad(wrong: bool) -> Training:
    model = Mil(ProdWrong if wrong else Prod)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = torch.randn(16, 6, 20), torch.randint(2, (16,)).float()
            with bf16():
                p = model(x)
            loss = F.binary_cross_entropy(p.float().clamp(1e-4, 1 - 1e-4), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)


class Dropped(nn.Module):
    """A dropout that divides by the share that it truly kept."""

    def __init__(self, wrong: bool, p: float = 0.4) -> None:
        super().__init__()
        self.wrong, self.p = wrong, p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = (torch.rand_like(x, dtype=torch.float32) > self.p).to(x.dtype)
        kept = float(mask.mean())
        return x * mask * ((1 - kept) if self.wrong else 1 / (kept + 1e-9))


@bug(
    "ayrna/dlordinal#138",
    "a dropout multiplies what it keeps by the share of zeros and not by one over the share that is kept",
    fair="dropout, forward pass",
    kind=FACT,
    precision="bf16",
)
def dropout_factor(wrong: bool) -> Training:
    model = MLP()
    model.net.insert(5, Dropped(wrong))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, rows))
