"""The state that a backend loads, beside the one that was saved."""

import torch

from mpcompare.verdict.examine.reload import lost_entries


def test_what_a_state_lost_is_listed():
    def state(**changes):
        found = {
            "params": {"w": torch.tensor([1.0, 0.0])},
            "buffers": {"mean": torch.zeros(2)},
            "optimizer": {"exp_avg": {"w": torch.ones(2)}, "step": {"w": torch.ones(())}},
            "loss_scale": {"scale": 4.0, "growth_tracker": 1},
        }
        return {**found, **changes}

    assert lost_entries(state(), state()) == []
    assert lost_entries(state(params={"w": torch.tensor([1.0, -0.0])}), state()) == ["params"]  # bit for bit
    other = state(optimizer={"exp_avg": {"w": torch.ones(2)}}, loss_scale={"scale": 2.0}, buffers={})
    assert lost_entries(state(), other) == [
        "buffers",
        "optimizer.step",
        "loss_scale.scale",
        "loss_scale.growth_tracker",
    ]
    assert lost_entries(other, state()) == ["loss_scale.scale"]  # more is no loss
