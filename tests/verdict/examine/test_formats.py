"""The formats that a replayed network is told of."""

import torch

from mpcompare.verdict.examine.forced.formats import limits_as_recorded
from mpcompare.verdict.examine.forced.record import Call


def test_the_limits_of_a_format_are_those_of_the_recorded_one():
    row = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    with limits_as_recorded(Call([row], [row]), torch.float64):
        assert torch.finfo(torch.float64).eps == 2.0**-7
        assert torch.finfo(torch.float32).eps == 2.0**-23
    assert torch.finfo(torch.float64).eps == 2.0**-52
