"""Constants that a network makes in the dtype of its input, as the norm of a graph."""

import pytest
import torch
from support.backends import BACKENDS
from support.foreign import Network, images
from support.mutations import layers_of, subject_of
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.fp32 import Fp32
from mpcompare.precision import PRECISIONS
from mpcompare.verdict.examine.forced.random_numbers import Noted
from mpcompare.verdict.judge.check import Case
from mpcompare.verdict.judge.layers import checks as layer_checks

# Numbers of neighbours: the norm of each is off by more than a unit roundoff of the precision. In bf16 torch's kernels
# for a power round 29 once or twice: that depends on the CPU, and on the number of elements.
BY_ROOTS = [("bf16", 29), ("fp16", 3)]
BY_PARTS = [("bf16", 51), ("fp16", 55)]


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


class NormedByParts(Normed):
    """Multiplies by a part, a part and the number."""

    def norm_of(self, x):
        part = torch.ones(x.shape[-1], dtype=x.dtype) / self.neighbours
        return part * part * self.neighbours


CASES = [(Normed, *case) for case in BY_ROOTS] + [(NormedByParts, *case) for case in BY_PARTS]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision", "neighbours"), CASES)
def test_constants_of_16_bits_are_rounded_as_in_the_step(kind, precision, neighbours):
    network = Network("normed", "torch", lambda: kind(neighbours), lambda samples: images(28, 1, samples))
    amp, run = (
        layers_of(subject_of(network, precision, make), name)
        for name, make in (("amp", Amp), ("run", BACKENDS["master_weights"]))
    )
    assert [check.because for check in layer_checks(Case(run, amp)) if not check.passed] == []


@pytest.mark.parametrize(
    ("norm_of", "roundings"),
    [
        (lambda ones: ones, 1),  # kept in 16 bits
        (lambda ones: ones / 3, 1),
        (lambda ones: (ones / 3).expand(2, 4), 1),
        (lambda ones: ones / 3 * (ones / 3), 3),
        (lambda ones: (third := ones / 3) * third, 5),  # one rounding that comes twice, and one more
        (lambda ones: (3 * ones).sqrt()[:2].repeat(2), 2),
        (lambda ones: (ones / 3 * 5).sin(), 1),  # positions are not rounded
        (lambda ones: (ones.float() / 3).to(ones.dtype) / 5, 2),
    ],
)
def test_the_roundings_of_a_constant_are_counted_where_it_multiplies(norm_of, roundings):
    x = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    with Noted({}) as noted:
        norm = norm_of(torch.ones(4, dtype=torch.bfloat16))
        norm * x
    (found,) = noted.constants.at.values()
    assert found == (torch.bfloat16, roundings)


class WrittenInto(nn.Module):
    """Writes numbers into a constant in the dtype of its input, part by part, as DeepSeek-V3.2 puts its keys together.
    And it adds numbers to a constant in place."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.tanh = nn.Linear(784, 32), nn.Linear(32, 10), nn.Tanh()

    def forward(self, x):
        x = self.first(x.flatten(1))
        keys = x.new_full(x.shape, 0.1)
        keys[:, :16].copy_(x[:, 16:])
        keys[:, 16:] = x[:, :16]
        shift = x.new_full(x.shape, 0.1)
        shift += keys
        return self.last(self.tanh(shift))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_constant_that_is_written_into_is_the_tensor_that_holds_the_numbers(precision):
    network = Network("written", "torch", WrittenInto, lambda samples: images(28, 1, samples))
    amp, run = (
        layers_of(subject_of(network, precision, make), name)
        for name, make in (("amp", Amp), ("run", BACKENDS["master_weights"]))
    )
    place = amp.findings.replays["first"].places["input tanh"]
    assert place.rounding < PRECISIONS[precision].unit_roundoff * place.norm
    assert [check.because for check in layer_checks(Case(run, amp)) if not check.passed] == []


class Placed(nn.Module):
    """Adds sines of far positions in the dtype of its input."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Identity(), nn.Linear(784, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.last(torch.cat([x[:, :392], (torch.arange(392, dtype=x.dtype) / 7).sin().expand(len(x), -1)], 1))


def test_far_positions_in_16_bits_are_told_from_other_errors():
    network = Network("placed", "torch", Placed, lambda samples: images(28, 1, samples))
    amp, run = (
        layers_of(subject_of(network, "fp16", make), name)
        for name, make in (("amp", Amp), ("run", BACKENDS["master_weights"]))
    )
    (check,) = (check for check in layer_checks(Case(run, amp)) if not check.passed)
    assert check.because.startswith("what arrives at last in the first step is ")
    assert check.because.endswith("make: it depends on no parameter, as positions do, and is computed in fp16")


def test_looking_for_positions_in_16_bits_asks_for_no_16_bits():
    network = Network("placed", "torch", Placed, lambda samples: images(28, 1, samples))
    replay = layers_of(subject_of(network, "fp32", Fp32), "fp32").findings.replays["first"]
    assert (replay.formats, replay.constants) == ({}, [])


class Angles(nn.Module):
    """Multiplies by cosines in a format."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(784, 24), nn.Linear(24, 10)

    def forward(self, x):
        return self.last(self.first(x.flatten(1)) * torch.linspace(0.3, 7, 24).cos().to(self.kind))


class InBf16(Fp32):
    def __init__(self, *args):
        super().__init__(*args)
        self.model.kind = torch.bfloat16


@pytest.mark.parametrize(("kind", "far"), [(torch.float32, True), (torch.bfloat16, False)])
def test_constants_in_another_format_are_right_where_the_network_itself_asks_for_it(kind, far):
    network = Network("angles", "torch", lambda: Angles(kind), lambda samples: images(28, 1, samples))
    run = layers_of(subject_of(network, "fp32", InBf16), "fp32")
    assert (run.findings.replays["first"].places["input last"].far > 100) is far
