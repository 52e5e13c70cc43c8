"""A step in which every number is 0, and the networks that such a step tests."""

import math
from dataclasses import replace

import pytest
import torch
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.marks import slow_after
from support.tasks import make_task
from torch import nn
from torch.nn import functional as F

from mpcompare.backends.amp import Amp

MLP = make_task(in_features=20, hidden=[64], out_features=5, batch_size=64, samples=64 * 3)
DATA = dataset_of(MLP)


class Normed(nn.Module):
    """An MLP with a norm whose eps fp16 does not hold."""

    def __init__(self, divided_by=None):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(20, 64), nn.LayerNorm(64, eps=1e-12), nn.Linear(64, 5)
        self.divided_by = divided_by

    def forward(self, x):
        x = x if self.divided_by is None else x / self.divided_by(x)
        return self.last(F.gelu(self.norm(self.first(x))))


def eps_in_16_bits(norm, dtype, x):
    centred = x.float() - x.float().mean(-1, keepdim=True)
    variance = (centred.square().mean(-1, keepdim=True) + norm.eps).to(dtype)
    return centred * variance.rsqrt().float() * norm.weight + norm.bias


class EpsIn16Bits(Amp):
    """The sum of variance and eps is rounded to the precision."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        norm = self.model.norm
        norm.forward = lambda x: eps_in_16_bits(norm, self.compute_dtype, x)


def found(backend, model, precision="bf16"):
    findings = examined("run", backend, replace(MLP, model=model), DATA, precision, steps=2).findings
    return findings.of_checks.get("padding")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_right_backend_is_finite(precision):
    padding = found(BACKENDS["amp"], Normed, precision)
    assert padding.loss == pytest.approx(math.log(5), rel=0.01)
    assert padding.exact_loss == pytest.approx(math.log(5))
    assert list(padding.finite.values()) == [True] * 6


@pytest.mark.slow
def test_an_eps_that_16_bits_do_not_hold_is_nan():
    wrong = found(EpsIn16Bits, Normed, "fp16")
    assert math.isnan(wrong.loss)
    assert not wrong.finite["norm.weight"]
    assert not math.isnan(found(EpsIn16Bits, Normed, "bf16").loss)  # bf16 holds 1e-12


@pytest.mark.slow
def test_it_is_left_out_where_nothing_divides_or_fp32_has_no_number():
    def zero(x):
        return torch.zeros_like(x)

    assert found(BACKENDS["amp"], lambda: nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 5))) is None
    assert found(BACKENDS["amp"], lambda: Normed(lambda x: x.square().sum(-1, keepdim=True))) is None
    assert found(BACKENDS["amp"], lambda: Normed(lambda x: zero(x) + 2)) is not None


@pytest.mark.parametrize("kind", slow_after(1, [AssertionError, TypeError, ValueError]))
def test_it_is_left_out_of_a_network_that_refuses_such_inputs(kind):
    def refuse(x):
        if not x.any():
            raise kind("nothing to see")
        return 1

    assert found(BACKENDS["amp"], lambda: Normed(refuse)) is None
