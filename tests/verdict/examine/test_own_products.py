"""Products that no layer of torch's makes: in layers with code of their own, as in a router, and between layers."""

import pytest
import torch
from support.backends import BACKENDS
from support.foreign import Network, images
from support.marks import diagonal, slow_after
from support.mutations import layers_of, subject_of
from torch import nn
from torch.nn import functional as F

from mpcompare.backends.amp import Amp
from mpcompare.verdict.judge.check import Case
from mpcompare.verdict.judge.layers import checks as layer_checks
from mpcompare.verdict.judge.layers import doubt


class Cancelling(nn.Module):
    """Multiplies numbers that come twice with weights whose terms cancel but for a hundredth: a rounding of a weight is
    as large as the result."""

    def __init__(self, wide):
        super().__init__()
        half = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
        self.weight, self.wide = nn.Parameter(torch.cat([half, 0.01 * half.flip(0) - half], dim=1)), wide

    def forward(self, x):
        x = torch.cat([x, x], dim=-1)
        if not self.wide:
            return F.linear(x, self.weight)
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), self.weight.float()).to(x.dtype)


class Between(Cancelling):
    """Multiplies between two layers, as the experts of a mixture do."""

    def __init__(self, wide):
        super().__init__(wide)
        self.after = nn.Tanh()

    def forward(self, x):
        return self.after(super().forward(x))


class Several(Between):
    """Multiplies in fp32 first, and then as its parent does."""

    def __init__(self, wide):
        super().__init__(wide)
        self.turn = nn.Parameter(torch.eye(32).flip(0))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            turned = F.linear(x.float(), self.turn.float())
        return super().forward(turned.to(x.dtype))


class Routed(nn.Module):
    def __init__(self, wide=False, own=Cancelling):
        super().__init__()
        self.first, self.own = nn.Linear(784, 32), own(wide)

    def forward(self, x):
        return self.own(self.first(x.flatten(1)).relu())


@pytest.mark.parametrize("wide", slow_after(1, [False, True]))
@diagonal(1, own=[Cancelling, Between, Several], precision=["bf16", "fp16"])
def test_operands_of_products_are_rounded_as_the_step_did(own, precision, wide):
    network = Network("routed", "torch", lambda: Routed(wide, own), lambda samples: images(28, 1, samples))
    amp = layers_of(subject_of(network, precision, Amp), "amp")
    place = amp.findings.replays["first"].places["output own" if own is Cancelling else "input own.after"]
    assert place.error <= 2 * place.rounding
    assert not doubt(amp)
    run = layers_of(subject_of(network, precision, BACKENDS["master_weights"]), "run")
    because = [check.because for check in layer_checks(Case(run, amp)) if not check.passed]
    assert not because


@pytest.mark.slow
def test_a_product_in_fewer_digits_than_those_of_the_reference_is_found():
    def spoilt(*args):
        backend = Amp(*args)
        own = backend.model.own
        forward = own.forward
        own.forward = lambda x: forward(x.to(torch.float8_e4m3fn).to(x.dtype))
        return backend

    network = Network("routed", "torch", Routed, lambda samples: images(28, 1, samples))
    amp, run = (layers_of(subject_of(network, "bf16", make), name) for make, name in ((Amp, "amp"), (spoilt, "run")))
    failed = [check for check in layer_checks(Case(run, amp)) if not check.passed]
    assert failed
    assert "own" in failed[0].because


class Rotates(nn.Module):
    """Turns its input by angles. They are a product of far positions, which autocast takes in bf16."""

    def forward(self, x):
        positions = torch.arange(65536.0, 65536 + x.shape[-1]).view(-1, 1)
        angles = (positions @ torch.ones(1, 1)).view(-1)
        return x * angles.cos().to(x.dtype)


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.own, self.last = nn.Linear(784, 32), Rotates(), nn.Linear(32, 10)

    def forward(self, x):
        return self.last(self.own(self.first(x.flatten(1))))


def test_a_product_of_constants_in_16_bits_is_no_rounding():
    network = Network("rotated", "torch", Rotated, lambda samples: images(28, 1, samples))
    place = layers_of(subject_of(network, "bf16", Amp), "amp").findings.replays["first"].places["output own"]
    assert place.error > 10 * place.rounding
