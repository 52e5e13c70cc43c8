"""The answers that a replayed layer gets as the recorded layer did: its choices, and the limits of its format."""

import pytest
import torch

from mpcompare.verdict.examine.forced.as_recorded import as_recorded
from mpcompare.verdict.examine.forced.record import Call

ROW = torch.tensor([[1.0, 3.0, 3.001, float("-inf"), -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("recorded", "taken"),
    [
        ([[1, 2]], [[1, 2]]),  # bf16 does not tell the two apart
        ([[1, 4]], [[2, 1]]),  # a choice that no rounding makes
        ([[2, 3]], [[2, 1]]),  # a number that was masked
        ([[2, 0]], [[2, 1]]),
    ],
)
def test_a_choice_between_numbers_that_are_nearly_one_is_the_recorded_one(recorded, taken):
    call = Call([ROW.bfloat16()], [torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor(recorded)])
    row = ROW.clone().requires_grad_()
    with as_recorded(call, torch.float64):
        values, places = row.topk(2)
    assert places.tolist() == taken
    assert torch.equal(values, ROW.gather(1, places))
    values.sum().backward()
    assert row.grad.nonzero()[:, 1].tolist() == sorted(taken[0])


def test_the_limits_of_a_format_are_those_of_the_recorded_one():
    call = Call([ROW.bfloat16()], [ROW.bfloat16()])
    with as_recorded(call, torch.float64):
        assert torch.finfo(torch.float64).eps == 2.0**-7
        assert torch.finfo(torch.float32).eps == 2.0**-23
    assert torch.finfo(torch.float64).eps == 2.0**-52
