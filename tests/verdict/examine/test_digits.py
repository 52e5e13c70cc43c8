"""The digits that 16 bits lose at each layer of a recorded step."""

import math
from types import SimpleNamespace

import pytest
import torch
from support.foreign import Network, images
from support.mutations import layers_of, subject_of
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.report.digits_row import DigitsRow, Map
from mpcompare.verdict.judge.layers import doubt

U = {"fp16": 2.0**-11, "bf16": 2.0**-8}
PRECISIONS = pytest.mark.parametrize("precision", U)


class Norm(nn.Module):
    """A norm of the user's own, which squares its input."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(784, 32), Norm(32), nn.Linear(32, 10)

    def forward(self, x):
        return self.last(self.norm(500 * self.first(x.flatten(1))))


class Minus(nn.Module):
    def forward(self, a, b):
        return a - b


class Cancels(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.minus, self.last = nn.Linear(784, 32), Minus(), nn.Linear(32, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.last(10 * self.minus(x + 100, x / 2 + 100))


class Faint(nn.Module):
    """A branch behind a layer scale of 1e-9, so that its gradients are below fp16's normal numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(784, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.last(x + 1e-9 * self.branch(x))


class Shift(nn.Module):
    """Adds a number, which a norm takes away again: its gradient is 0 but for roundings."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.weight


def shifted():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), Shift(), nn.LayerNorm(64), nn.Linear(64, 10))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))


def examined(make, precision):
    network = Network("here", "here", make, lambda samples: images(28, 1, samples), (precision,))
    return layers_of(subject_of(network, precision, Amp), "amp")


def digits_of(make, precision):
    return examined(make, precision).findings.replays["first"].digits


def row(digits, precision):
    entry = SimpleNamespace(run=SimpleNamespace(result=SimpleNamespace(precision=precision)))
    return DigitsRow(None, entry, Map(None, entry, entry, "first", {}), "", digits)


@pytest.mark.slow
@PRECISIONS
def test_a_right_mlp_loses_less_than_a_digit_anywhere(precision):
    digits = digits_of(mlp, precision)
    assert list(digits) == ["1", "3", "4", "5"]  # the other layers select numbers
    assert [each.kind for each in digits.values()] == ["Linear", "LayerNorm", "GELU", "Linear"]
    for each in digits.values():
        assert 0.2 * U[precision] < each.output < 2 * U[precision]
        assert 0.2 * U[precision] < each.gradient < 2 * U[precision]
        shown = row(each, precision)
        assert shown.lost(each.gradient) < 1
        assert shown.advice == shown.why == ""
        assert (each.overflow, each.operator) == (0, "")


class Powers(nn.Module):
    """Powers of a number, as of rotary positions, that fp16 does not hold."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(784, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.last(self.first(x.flatten(1)) * (1.0 / 1e6 ** (torch.arange(32) / 32)))


def test_powers_beyond_fp16_are_no_squares():
    assert row(digits_of(Powers, "fp16")["before last"], "fp16").why == "powers above 65504"


@pytest.mark.slow
def test_squares_beyond_fp16_are_named_in_the_layer_and_in_the_doubt_of_the_reference():
    run = examined(Large, "fp16")
    digits = run.findings.replays["first"].digits
    norm = digits["norm"]
    assert (norm.operator, norm.in_backward) == ("square", False)
    assert 65504 < norm.largest < 1e7
    assert row(norm, "fp16").advice == "keep in fp32"
    assert row(norm, "fp16").why == "squares above 65504"
    assert [place for place, each in digits.items() if each.operator] == ["norm"]
    assert run.layers["norm"]["computes"] == "fp32+fp16"
    said = "the output of norm in the first step is itself 100 % off, beyond what roundings make: squares above 65504"
    assert doubt(run) == said
    assert not any(each.operator for each in digits_of(Large, "bf16").values())


@pytest.mark.slow
@PRECISIONS
def test_a_difference_of_near_equal_numbers_loses_most_digits(precision):
    digits = digits_of(Cancels, precision)
    minus = digits["minus"]
    # Numbers of 100 leave a number below 1: each rounding of 100 is u / sqrt(3) of it on both sides.
    expected = minus.terms * U[precision] / math.sqrt(3)
    assert minus.terms > 100
    assert 0.9 * expected < minus.output < 1.1 * expected
    shown = row(minus, precision)
    assert shown.lost(minus.output) > 6.5
    assert shown.advice == "keep in fp32, with what it is given"
    assert f"for it sums what is {minus.terms:.2g} times as large" in shown.why
    assert [place for place, each in digits.items() if row(each, precision).advice] == ["minus"]


def test_work_between_layers_has_a_place_of_its_own():
    digits = digits_of(Cancels, "bf16")
    assert list(digits) == ["first", "before minus", "minus", "before last", "last"]
    assert digits["before minus"].kind == ""
    assert digits["before minus"].output < U["bf16"]


def test_underflow_is_named_where_it_takes_the_digits():
    branch = digits_of(Faint, "fp16")["branch"]
    assert branch.underflow > 0.9
    assert row(branch, "fp16").advice == "keep in fp32"
    assert row(branch, "fp16").why.endswith("; most of the gradient that arrives is below fp16's normal numbers")
    right = digits_of(Faint, "bf16")["branch"]
    assert (right.underflow, row(right, "bf16").advice) == (0, "")


def test_a_gradient_that_is_0_but_for_roundings_is_no_reason_for_fp32():
    shift = digits_of(shifted, "bf16")["2"]
    assert shift.gradient > 2.0**-4 * 2**16  # sqrt(u) of bf16, and fp32 has 16 digits more
    assert row(shift, "bf16").advice == ""
    assert row(shift, "bf16").why == "its gradient is 0 but for roundings, in fp32 too"


def test_the_effect_on_the_loss_is_that_of_the_products_of_outputs_and_gradients():
    torch.manual_seed(0)
    network = Network("here", "here", mlp, lambda samples: images(28, 1, samples), ("bf16",))
    subject = subject_of(network, "bf16", Amp)
    ((x, y),) = next(subject.batches())
    logits = subject.model(x)
    logits.retain_grad()
    loss = nn.functional.cross_entropy(logits, y)
    loss.backward()
    expected = (logits * logits.grad).detach().norm().item() * U["bf16"] / math.sqrt(3) / loss.item()
    found = layers_of(subject, "amp").findings.replays["first"].digits["5"].loss
    assert found == pytest.approx(expected, rel=0.05)
