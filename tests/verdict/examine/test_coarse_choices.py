"""Choices by numbers of fewer digits than the reference's numbers have, and choices that only seem so."""

import pytest
import torch
from support.backends import BACKENDS
from support.foreign import Network, images
from support.marks import diagonal
from support.mutations import layers_of, subject_of
from torch import nn
from torch.nn import functional as F

from mpcompare.backends.amp import Amp
from mpcompare.verdict.judge.check import Case
from mpcompare.verdict.judge.layers import checks as layer_checks


class Codes(nn.Module):
    """Takes the nearest code of each row. A distance is made of a product, which has 16 bits, and of squares of codes,
    which autocast leaves in fp32."""

    def __init__(self):
        super().__init__()
        self.first, self.codes, self.last = nn.Linear(784, 16), nn.Embedding(8, 16), nn.Linear(16, 10)

    def forward(self, x):
        x, codes = self.first(x.flatten(1)), self.codes.weight
        far = codes.square().sum(1) - 2 * x @ codes.t()
        nearest = self.codes(far.argmin(1))
        return self.last(x + nearest)


class Masked(nn.Module):
    """Makes a mask in the dtype of its input, and truth values of the mask; and takes the largest number away from
    scores, whose place nobody needs."""

    def __init__(self):
        super().__init__()
        self.first, self.sink, self.last = nn.Linear(784, 16), nn.Parameter(torch.zeros(1)), nn.Linear(16, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        mask = (torch.arange(16) % 2).to(x.dtype)
        scores = torch.cat([x.masked_fill(mask.to(torch.bool), -1.0), self.sink.expand(len(x), 1)], dim=1)
        scores = scores - scores.max(dim=1, keepdim=True).values
        return self.last(x * scores.softmax(1)[:, :-1])


class Finite(nn.Module):
    """Replaces infinite factors, as a graph does with nodes that have no neighbours, and numbers that are NaN. All of
    these are in the dtype of the input."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(784, 10)

    def forward(self, x):
        x = x.flatten(1)
        root = (torch.arange(784) % 4).to(x.dtype).pow(-0.5)
        root = root.masked_fill(root == torch.inf, 0.0)
        return self.last(torch.where(x.isnan(), 0.0, x) * root)


class Routed(nn.Module):
    """Chooses one of two layers, by numbers in fp32 unless it is coarse."""

    coarse = False

    def __init__(self):
        super().__init__()
        self.first, self.router = nn.Sequential(nn.Linear(784, 16), nn.Tanh()), nn.Parameter(torch.randn(2, 16))
        self.one, self.two = nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        with torch.autocast("cpu", enabled=False):
            kind = x.dtype if self.coarse else torch.float32
            best = F.linear(x.to(kind), self.router.to(kind)).argmax(1, keepdim=True)
        return torch.where(best == 0, self.one(x), self.two(x))


def failed(net, precision, make):
    network = Network("net", "torch", net, lambda samples: images(28, 1, samples))
    amp, run = (layers_of(subject_of(network, precision, each), name) for each, name in ((Amp, "amp"), (make, "run")))
    return [check.because for check in layer_checks(Case(run, amp)) if not check.passed]


@pytest.mark.slow
@diagonal(2, net=[Codes, Finite, Masked, Routed], precision=["bf16", "fp16"])
def test_choices_by_numbers_of_as_many_digits_are_right(net, precision):
    assert failed(net, precision, BACKENDS["master_weights"]) == []


def test_a_router_in_16_bits_is_found():
    def coarse(*args):
        backend = Amp(*args)
        backend.model.coarse = True
        return backend

    (because,) = failed(Routed, "bf16", coarse)
    assert because.startswith("argmax in test_coarse_choices.py:")
    assert because.endswith("chooses by bf16 numbers in the first step, and the reference by fp32")
