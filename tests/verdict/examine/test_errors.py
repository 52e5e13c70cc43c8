"""Errors of gradients and of updates compared with the exact ones."""

import math

import pytest
import torch

from mpcompare.tasks.optimizers import Sgd
from mpcompare.verdict.examine.errors import gradient_errors, update_errors
from mpcompare.verdict.examine.seen import Seen


def test_gradient_errors_are_measured_beside_the_exact_ones():
    exact = {"W1": torch.tensor([[3.0, 0.0], [4.0, 0.0]]).double(), "b1": torch.tensor([1.0, 2.0]).double()}
    grads = {"W1": torch.tensor([[3.0, 4.0], [0.0, 0.0]])}  # the transpose
    found = gradient_errors(grads, exact)
    W1 = found["W1"]
    assert (W1.norm, W1.largest, W1.elements) == (5.0, 4.0, 2)
    assert W1.error == pytest.approx(math.sqrt(32))
    assert W1.transposed == 0
    assert W1.zeros == 0.5  # the 4, of the two elements that are not 0
    assert found["b1"] is None  # missing

    scaled = gradient_errors({"b1": torch.tensor([0.25, 0.5])}, {"b1": exact["b1"]})["b1"]
    assert scaled.slope == pytest.approx(0.25)
    assert scaled.residual == pytest.approx(0, abs=1e-12)


def change(before, after, grad, lr):
    return Seen({"w": before}, {"w": after}, {"w": grad}, lr)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fp32_updates_are_within_their_roundings_and_16_bit_ones_are_not(momentum):
    torch.manual_seed(0)
    module = torch.nn.Parameter(torch.randn(100, 30))
    optimizer = torch.optim.SGD([module], lr=1e-3, momentum=momentum)
    fp32, short = Sgd(1e-3, momentum).replay(), Sgd(1e-3, momentum).replay()
    for _ in range(4):
        before, g = module.detach().clone(), torch.randn(100, 30)
        module.grad = g.clone()
        optimizer.step()
        e = update_errors(fp32, change(before, module.detach(), g, 1e-3), torch.bfloat16)["w"]
        assert 0.5 < e.excess <= 1  # the update is within the bound, and the bound is hardly too wide
        assert e.slope == pytest.approx(1, abs=1e-4)
        assert e.lost == e.lost_in_fp32 == 0
        assert e.short < 0.01
        low, rounded = before.bfloat16().float(), module.detach().bfloat16().float()
        e = update_errors(short, change(low, rounded, g, 1e-3), torch.bfloat16)["w"]
        assert e.excess > 1000
        assert e.lost > 0.3
        assert e.short == 1


def test_updates_that_fp32_itself_loses_are_told_apart():
    before, after, g = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]), torch.tensor([1e-9, 1.0])
    e = update_errors(Sgd(1.0).replay(), change(before, after, g, 1.0), torch.float16)["w"]
    assert e.lost == e.lost_in_fp32 == 0.5
    assert e.excess <= 1
