"""The loss scale of a run compared with its policy's."""

from mpcompare.loss_scale import DynamicLossScale
from mpcompare.verdict.examine.loss_scale import first_wrong_scale
from mpcompare.verdict.judge.loss_scale import WrongScale


def test_the_first_wrong_loss_scale_is_found():
    rows = [
        {"step": 1, "loss_scale": 65536.0, "skipped": True},
        {"step": 2, "loss_scale": 32768.0, "skipped": False},
        {"step": 3, "loss_scale": 65536.0, "skipped": False},
    ]
    policy = DynamicLossScale(growth_interval=2)
    expected = WrongScale(step=3, loss_scale=65536.0, should_scale=32768.0)
    assert first_wrong_scale(policy, rows) == expected
    assert first_wrong_scale(policy, rows[:2]) is None
    assert policy.growth_tracker == 0
