"""Kinks of functions that a network calls."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpcompare.verdict.examine.kinks import kinks_tell

UNIT_ROUNDOFF = 2.0**-9


class Squared(nn.Module):
    def forward(self, x):
        return F.relu(x).square()


class Clamped(nn.Module):
    def forward(self, x):
        return x.clamp(-1, 1)


@pytest.mark.parametrize(
    ("function", "tell"), [(nn.GELU, False), (Squared, False), (nn.ReLU, True), (nn.Hardtanh, True), (Clamped, True)]
)
def test_only_jumps_of_a_derivative_tell(function, tell):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64), function(), nn.Linear(64, 4)).double()
    x, y = torch.randn(32, 8, dtype=torch.float64), torch.randint(4, (32,))

    def grads():
        parameters = dict(network.named_parameters())
        loss = F.cross_entropy(network(x), y)
        return dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))

    rounding = {name: UNIT_ROUNDOFF * g.norm().item() for name, g in grads().items()}
    assert kinks_tell(grads, UNIT_ROUNDOFF, rounding) is tell
