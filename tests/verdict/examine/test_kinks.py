"""Functions with kinks, between layers or within one: a replay stays on the step's side of each kink."""

import math
from dataclasses import replace

import pytest
import torch
from support.foreign import Network, images
from support.marks import diagonal
from support.mutations import layers_of, subject_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpcompare.backends.amp import Amp
from mpcompare.dtypes import HALF
from mpcompare.verdict.examine.forced.kinks import on_their_side
from mpcompare.verdict.judge.check import Case
from mpcompare.verdict.judge.layers import checks as layer_checks

# Each is linear between its kinks, and given images [batch, 8, 14, 14].
FUNCTIONS = {
    "relu": torch.relu,
    "maximum": lambda x: torch.maximum(x, 0.3 * x.flip(1)),
    "largest": lambda x: x.amax((2, 3), keepdim=True).expand_as(x),
    "rounded straight through": lambda x: x + ((8 * x).round() / 8 - x).detach(),
    "relu in place": torch.relu_,
    "leaky relu": lambda x: F.leaky_relu(x, 0.1),
    "relu6": F.relu6,
    "relu6 in place": lambda x: F.relu6(x, inplace=True),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "softshrink": lambda x: F.softshrink(x, 0.1),
    "prelu": lambda x: F.prelu(x, torch.full((8,), 0.1, dtype=x.dtype)),
    "clamp": lambda x: x.clamp(-0.2, 0.2),
    "abs": abs,
    "max of two": lambda x: torch.max(x, 0.3 * x.flip(1)),
    "pooled": lambda x: F.max_pool2d(x, 2),
    "pooled in rows": lambda x: F.max_pool1d(x.flatten(2), 4).unsqueeze(2),
    "largest so far": lambda x: x.flatten(2).cummax(-1)[0].view(x.shape),
    "pooled to a size": lambda x: F.adaptive_max_pool2d(x, 3),
    "signs straight through": lambda x: x + (x.sign() - x).detach(),
}


class Summed(nn.Module):
    """A function of a sum of three layers, of which 16 bits round two sums."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList(nn.Conv2d(1, 8, 3, 2, 1) for _ in range(3))
        self.second, self.last = nn.Conv2d(8, 8, 1), nn.Linear(8, 10)
        self.function = function

    def forward(self, x):
        a, b, c = (layer(x) for layer in self.first)
        return self.last(self.second(self.function(a + b + c)).mean((2, 3)))


class Repeated(Summed):
    """A checkpoint computes the function twice, and backward computes it once more."""

    def block(self, x):
        a, b, c = (layer(x) for layer in self.first)
        return self.second(self.function(a + b + c))

    def forward(self, x):
        twice = sum(checkpoint(self.block, part * x, use_reentrant=False) for part in (1.0, 0.5))
        return self.last(twice.mean((2, 3)))


class OfALayer(Summed):
    """One of two operands is the output of a layer."""

    def forward(self, x):
        a, b, c = (layer(x) for layer in self.first)
        return self.last(self.second(torch.maximum(a + b, c)).mean((2, 3)))


class OfASum(nn.Module):
    """A layer that calls the function of a sum, as a norm calls its activation."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, a, b, c):
        return self.function(a + b + c)


class WithinALayer(Summed):
    """The function is called within a layer."""

    def __init__(self, function):
        super().__init__(function)
        self.layer = OfASum(function)

    def block(self, x):
        return self.second(self.layer(*(layer(x) for layer in self.first)))

    def forward(self, x):
        return self.last(self.block(x).mean((2, 3)))


class WithinALayerRepeated(WithinALayer):
    """A checkpoint computes the layer twice."""

    forward = Repeated.forward


class WrittenInto(Summed):
    """The output of a layer is written into before the function is called."""

    def forward(self, x):
        a, b, c = (layer(x) for layer in self.first)
        a += b
        a += c
        return self.last(self.second(self.function(a)).mean((2, 3)))


def nearest(make, precision):
    """Returns the largest part of a limit that the layers of amp take, if they are held to roundings alone."""
    network = Network("kinks", "torch", make, lambda samples: images(28, 1, samples))
    amp = layers_of(subject_of(network, precision, Amp), "run")
    nothing = replace(amp, name="none", findings=replace(amp.findings, replays={}))
    assert len(amp.findings.replays["first"].places) > 10
    checks = layer_checks(Case(amp, nothing))
    return max(c.value / c.limit for c in checks if c.limit and not c.name.startswith("zeros"))


@pytest.mark.slow
@diagonal(4, name=list(FUNCTIONS), precision=["bf16", "fp16"])
def test_roundings_at_a_kink_are_no_errors(name, precision):
    assert nearest(lambda: Summed(FUNCTIONS[name]), precision) < 0.7


@pytest.mark.slow
@diagonal(
    3,
    make=[
        lambda: Repeated(FUNCTIONS["clamp"]),
        lambda: OfALayer(None),
        lambda: WrittenInto(abs),
        lambda: WithinALayer(abs),
        lambda: WithinALayerRepeated(FUNCTIONS["clamp"]),
    ],
    precision=["bf16", "fp16"],
)
def test_so_it_is_in_checkpoints_and_with_outputs_of_layers(make, precision):
    assert nearest(make, precision) < 0.7


# Each computes another function in 16 bits.
WRONG = {
    "slope": lambda x: F.leaky_relu(x, 0.12 if x.dtype in HALF else 0.1),
    "bound": lambda x: x.clamp(-0.2, 0.22 if x.dtype in HALF else 0.2),
    "gradient beyond the bounds": lambda x: x + (F.relu6(x) - x).detach() if x.dtype in HALF else F.relu6(x),
    "no gradient of the smaller one": lambda x: torch.maximum(x, 0.3 * (x.detach() if x.dtype in HALF else x).flip(1)),
    "floor": lambda x: x + ((x.floor() if x.dtype in HALF else x.round()) - x).detach(),
}


@diagonal(3, name=list(WRONG), network=[Summed, WithinALayer])
def test_a_wrong_function_is_found(name, network):
    # The check that fails may be near its limit: the sums of three layers have few digits in bf16.
    assert nearest(lambda: network(WRONG[name]), "bf16") > 1


def of_numbers(function, own, theirs, near):
    """Returns the result of a function on their side, and its gradient, where the given gradient is 1."""
    y = own.clone().requires_grad_()
    result = on_their_side(function, ((y,), {}), [theirs], near)
    return result, *torch.autograd.grad(result.sum(), y)


def test_a_result_is_linear_in_the_own_operands_on_the_side_of_the_step():
    own, theirs = torch.tensor([-3.0, -0.1, 0.1, 2.0]), torch.tensor([-3.0, 0.1, -0.1, 2.1])
    result, gradient = of_numbers(torch.relu, own, theirs, near=0.2)
    assert result.tolist() == pytest.approx([0.0, -0.1, 0.0, 2.0])
    assert gradient.tolist() == [0, 1, 0, 1]


def test_a_number_that_is_further_off_than_roundings_stays_on_its_side():
    own, theirs = torch.tensor([-1.0, -0.1, 2.0]), torch.tensor([1.0, 0.1, 2.0])
    result, gradient = of_numbers(torch.relu, own, theirs, near=0.2)
    assert result.tolist() == pytest.approx([0.0, -0.1, 2.0])
    assert gradient.tolist() == [0, 1, 1]


def test_infinity_in_a_mask_is_no_number_that_roundings_move():
    own, theirs = torch.tensor([-1.0, -0.1, 2.0, -math.inf]), torch.tensor([1.0, 0.1, 2.0, -math.inf])
    result, gradient = of_numbers(torch.relu, own, theirs, near=0.2)
    assert result.tolist() == pytest.approx([0.0, -0.1, 2.0, 0.0])
    assert gradient.tolist() == [0, 1, 1, 0]
