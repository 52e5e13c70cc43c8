"""Units at the kink of a relu between layers: a rounding of a sum of three layers turns some of them."""

import pytest
import torch
from support.foreign import Network, images
from support.mutations import layers_of, subject_of
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.verdict.examine.forced.choices import _rectified


class Summed(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.a, self.b, self.c, self.last = *(nn.Linear(784, 1024) for _ in range(3)), nn.Linear(1024, 10)
        self.relu = torch.relu_ if in_place else torch.relu

    def forward(self, x):
        x = x.flatten(1)
        return self.last(self.relu(self.a(x) + self.b(x) + self.c(x)))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_replay_turns_no_unit_that_the_step_did_not_turn(in_place):
    network = Network("summed", "torch", lambda: Summed(in_place), lambda samples: images(28, 1, samples))
    place = layers_of(subject_of(network, "bf16", Amp), "amp").findings.replays["first"].places["gradient a"]
    assert place.error < 2**-8 * place.norm
    assert place.rounding < 2**-8 * place.norm


def test_a_number_that_no_rounding_makes_0_stays_above_0():
    found = torch.tensor([0.0, 0.0, 1e-3, 0.5, 8.0])
    turned = _rectified(found, torch.tensor([True, False, False, False, True]), near=2**-5)
    assert (turned > 0).tolist() == [True, False, False, True, True]
    assert turned.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 8.0], abs=1e-30)
