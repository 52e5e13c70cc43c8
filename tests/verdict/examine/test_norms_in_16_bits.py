"""Norms whose numbers all have 16 bits. On a CPU torch computes their statistics in 16 bits, too."""

import pytest
from support.foreign import Network, images
from support.mutations import layers_of, subject_of
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.verdict.judge.limits import roundings


class Small(nn.Module):
    """Norms maps of 2 x 2 numbers, without weights."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, 14, 14), nn.InstanceNorm2d(16)
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).flatten(1))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_statistics_in_16_bits_are_roundings(precision):
    network = Network("small", "torch", Small, lambda samples: images(28, 1, samples))
    amp = layers_of(subject_of(network, precision, Amp), "amp")
    place = amp.findings.replays["first"].places["output norm"]
    assert place.error < 0.7 * roundings(amp, place)
