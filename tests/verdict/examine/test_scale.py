"""The loss scale of a run beside the one that its policy says."""

from mpcompare.loss_scale import DynamicLossScale
from mpcompare.verdict.examine import examine


def test_the_first_wrong_loss_scale_is_found():
    rows = [
        {"step": 1, "loss_scale": 65536.0, "skipped": True},
        {"step": 2, "loss_scale": 32768.0, "skipped": False},
        {"step": 3, "loss_scale": 65536.0, "skipped": False},
    ]
    policy = DynamicLossScale(growth_interval=2)
    expected = {"step": 3, "loss_scale": 65536.0, "should_scale": 32768.0}
    assert examine._first_wrong_scale(policy, rows) == expected
    assert examine._first_wrong_scale(policy, rows[:2]) is None
    assert policy.growth_tracker == 0
