"""A norm whose gradient torch's own kernel sums in 16 bits. This gradient is right, and so is the exact gradient."""

import copy

import pytest
import torch
from support.foreign import Network, images
from support.mutations import MUTATIONS, Mutated, layers_of, subject_of
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.verdict.examine.forced.kernels import of_kernels
from mpcompare.verdict.examine.forced.recorder import recorded
from mpcompare.verdict.judge.check import Case
from mpcompare.verdict.judge.layers import checks, doubt
from mpcompare.verdict.judge.limits import K
from mpcompare.verdict.judge.sight import sight


class Tokens(nn.Module):
    """A norm of 12,544 rows of 8 numbers, whose gradients have the same sign."""

    def __init__(self):
        super().__init__()
        self.patches, self.norm, self.last = nn.Conv2d(1, 8, 3), nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, x):
        x = self.norm(self.patches(x).flatten(2).mT)
        return self.last(torch.nn.functional.gelu(x).mean(1))


class InFp32(Amp):
    """Computes the norm in fp32."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        forward = self.model.norm.forward
        self.model.norm.forward = lambda x: forward(x.float())


NETWORK = Network("tokens", "here", Tokens, lambda samples: images(28, 1, samples))


def examined(make):
    return layers_of(subject_of(NETWORK, "bf16", make), "run")


@pytest.fixture(scope="module")
def amp():
    return examined(Amp)


def test_what_torchs_own_kernel_makes_is_known_bit_by_bit(amp):
    layers = amp.findings.replays["first"]
    assert layers.gradients["norm.bias"].error > 5 * K * layers.rounding["norm.bias"].error
    assert layers.of_kernels["norm.bias"].error == 0
    assert set(layers.of_kernels) <= {"norm.weight", "norm.bias"}  # the other layers are right


def test_a_reference_that_is_off_by_its_kernel_is_said_to_be_and_hides_nothing(amp):
    said = doubt(amp)
    assert said.startswith("the gradient of norm.bias in the first step is itself")
    assert said.endswith("beyond what roundings make: torch's own kernel makes it so of these operands")
    seen = sight(Case(examined(Amp), amp))
    assert (seen.unseen, seen.layers, seen.not_flagged) == ([], [], [])
    assert seen.resolution < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("make", [Amp, InFp32])
def test_the_kernels_gradient_is_right_and_so_is_an_exact_one(make, amp):
    assert [check.because for check in checks(Case(examined(make), amp)) if not check.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation", [m for m in MUTATIONS if m.name in ("halved", "norm in 16 bits")], ids=lambda m: m.name
)
def test_another_gradient_is_wrong_even_if_it_is_no_further_off(mutation, amp):
    place = "norm.bias" if mutation.spoil else "norm"
    run = examined(lambda *args: Mutated(*args, mutation=mutation, place=place))
    assert any(not check.passed and "norm" in check.because for check in checks(Case(run, amp)))


def test_a_norm_that_is_the_whole_network_has_names_without_a_layer():
    torch.manual_seed(0)
    network, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    stepped = copy.deepcopy(network)
    with recorded(stepped) as record:
        stepped(x).square().sum().backward()
    made = of_kernels(network, record, dict(stepped.named_buffers()), of={"weight"})
    assert made.layers == {""}
    assert torch.equal(made.grads["weight"], stepped.weight.grad)
    assert made.alike == {"output ", *(f"buffer {name}" for name, _ in network.named_buffers())}
