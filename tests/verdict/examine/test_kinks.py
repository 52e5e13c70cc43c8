"""Kinks of functions that a network calls."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpcompare.precision import PRECISIONS
from mpcompare.verdict.examine.kinks import beside_turned_units
from mpcompare.verdict.examine.oracle import exact_step

UNIT_ROUNDOFF = 2.0**-9


class Squared(nn.Module):
    def forward(self, x):
        return F.relu(x).square()


class Clamped(nn.Module):
    def forward(self, x):
        return x.clamp(-1, 1)


@pytest.mark.parametrize(
    ("function", "least", "most"),
    [
        (nn.GELU, 0, 0),
        (Squared, 0, 0.5),
        (nn.ReLU, 2, 100),
        (nn.Hardtanh, math.inf, math.inf),
        (Clamped, math.inf, math.inf),
    ],
)
def test_only_jumps_of_a_derivative_tell(function, least, most):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64), function(), nn.Linear(64, 4))
    x, y = torch.randn(32, 8), torch.randint(4, (32,))
    step = partial(exact_step, network, F.cross_entropy, [(x, y)], PRECISIONS["bf16"])
    exact, kinks = beside_turned_units(step, UNIT_ROUNDOFF)
    assert exact.grads.keys() == kinks.keys() == dict(network.named_parameters()).keys()
    first = kinks["0.weight"] / (UNIT_ROUNDOFF * exact.grads["0.weight"].norm().item())
    assert least <= first <= most
