"""While a mode of operators is entered, torch computes the derivative of ``prod`` by another formula. The watch shall
change no bit of it."""

import contextlib

import pytest
import torch
from support.marks import slow_after
from torch import Tensor, nn

import mpcompare


def area(model: nn.Module, x: Tensor) -> Tensor:
    """Returns the mean area of boxes, as losses of detectors do."""
    return (1 + model(x)).prod(1).square().mean()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    area(model, x).backward()
    optimizer.step()


def asked(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(area(model, x), x)
    plain(model, optimizer, (x + slope).detach())


def closed(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = area(model, x)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def beside(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """A backward that does not come to the network: something else is trained, and the inputs depend on it."""
    other = x[0].clone().requires_grad_()
    other.prod().backward()
    plain(model, optimizer, x + other.grad)  # type: ignore[operator]


@pytest.mark.parametrize("step", slow_after(3, [plain, asked, beside, closed]))
def test_no_bit_of_the_derivative_of_a_product_changes(step):
    def weights(watch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        kind = torch.optim.LBFGS if step is closed else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1)
        with watch(model, optimizer):
            for _ in range(3):
                optimizer.zero_grad()
                step(model, optimizer, torch.randn(32, 8))
        return list(model.parameters())

    pairs = zip(weights(mpcompare.watch), weights(lambda *_: contextlib.nullcontext()), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
