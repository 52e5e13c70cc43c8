"""Samples of layers of products, which are not computed again."""

import pytest
import torch
from support.foreign import Network, images
from support.mutations import layers_of, subject_of
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.verdict.examine.forced import samples, step
from mpcompare.verdict.examine.forced.known import KnownLayers


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.grouped = nn.Conv2d(1, 8, 3, stride=2), nn.Conv2d(8, 8, 3, groups=4, bias=False)
        self.hidden, self.last = nn.Linear(968, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = self.grouped(self.conv(x).relu())
        return self.last(torch.tanh(self.hidden(x.flatten(1))))


class Others(nn.Module):
    """Layers of products that have to be computed: a sum of two rounded results, and gradients that are sums."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(28, 28), nn.Linear(28, 28), nn.Linear(28, 10)
        self.tied = nn.Linear(28, 28)
        self.tied.weight = self.first.weight

    def forward(self, x):
        x = self.tied(self.first(x.squeeze(1).mT))
        return self.last(self.twice(self.twice(x))[:, 0] + self.last.weight[0])


def gray(number):
    return images(28, 1, number)


@pytest.fixture
def known(monkeypatch):
    made = []

    def make(*args):
        made.append(KnownLayers(*args))
        return made[-1]

    monkeypatch.setattr(step, "KnownLayers", make)
    # As on a CPU with kernels for 16 bits. Without such kernels convolutions are computed, because their sums round.
    monkeypatch.setattr(step, "convolves_in", lambda storage, device: torch.float32)
    return made


def replayed(network, precision="bf16"):
    subject = subject_of(Network("known", "here", network, gray), precision, Amp)
    return layers_of(subject, "run").findings.replays["first"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_samples_of_known_products_are_as_those_that_are_computed(precision, known, monkeypatch):
    monkeypatch.setattr(samples, "SAMPLES", 64)
    monkeypatch.setattr(samples, "MOST", 64)
    found = replayed(Products, precision)  # squares tell the size of terms; a computed layer tells it by one draw
    assert set(known[0].params) == {"conv", "grouped", "hidden", "last"}
    monkeypatch.setattr(KnownLayers, "__contains__", lambda self, layer: False)
    computed = replayed(Products, precision)
    assert found.places.keys() == computed.places.keys()
    for at, place in found.places.items():
        other = computed.places[at]
        assert (place.error, place.norm) == (other.error, other.norm)
        assert 0.4 * other.terms <= place.terms <= 2.5 * other.terms
        assert place.rounding == pytest.approx(other.rounding, rel=0.2)
        assert 0.5 < place.dimensions / other.dimensions < 2
    for name, rounding in found.rounding.items():
        other = computed.rounding[name]
        assert rounding.error == pytest.approx(other.error, rel=0.3)
        assert 0.5 < rounding.dimensions / other.dimensions < 2
        assert 0.5 < rounding.along / other.along < 2
        # A bias has one operand, whose relative error is between u / 2 and u. A product has two.
        assert 0.4 < rounding.terms / other.terms < (2.5 if name.endswith("weight") else 4)


def test_gradients_that_are_sums_and_outputs_that_are_rounded_twice_are_computed(known):
    replayed(Others)
    assert known[0].params == {}
