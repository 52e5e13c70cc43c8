"""Constants that a network makes in the dtype of its input, as the norm of a graph."""

import pytest
import torch
from support.backends import BACKENDS
from support.foreign import Network, images
from support.mutations import layers_of, subject_of
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.verdict.judge.check import Case
from mpcompare.verdict.judge.layers import checks as layer_checks

NEIGHBOURS = {"bf16": 29, "fp16": 3}  # whose norm is off by more than a unit roundoff of the precision


class Normed(nn.Module):
    """Divides numbers by a number of neighbours twice, as graph convolutions do: it multiplies by a root and a root.
    Under autocast the second numbers are in fp32, since a shift in fp32 was added to them."""

    def __init__(self, neighbours):
        super().__init__()
        self.neighbours = neighbours
        self.first, self.one = nn.Linear(784, 32), nn.Tanh()
        self.shift, self.two = nn.Parameter(torch.ones(32)), nn.Tanh()
        self.last = nn.Linear(32, 10)

    def norm_of(self, x):
        root = torch.full((x.shape[-1],), self.neighbours, dtype=x.dtype).pow(-0.5)
        return root * root

    def forward(self, x):
        x = self.first(x.flatten(1))
        x = self.one(self.norm_of(x) * x)
        x = x + self.shift
        return self.last(self.two(self.norm_of(x) * x))


@pytest.mark.parametrize("precision", NEIGHBOURS)
def test_constants_of_16_bits_are_rounded_once(precision):
    made = lambda: Normed(NEIGHBOURS[precision])  # noqa: E731
    network = Network("normed", "torch", made, lambda samples: images(28, 1, samples))
    amp, run = (
        layers_of(subject_of(network, precision, make), name)
        for name, make in (("amp", Amp), ("run", BACKENDS["master_weights"]))
    )
    assert [check.because for check in layer_checks(Case(run, amp)) if not check.passed] == []
