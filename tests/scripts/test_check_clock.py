"""The harness on this machine: two equal entrants come out equal."""

import check_clock
import pytest

SWEEPS = 5


@pytest.mark.slow
@pytest.mark.quiet
def test_a_backend_that_races_itself_is_as_fast_as_itself():
    """Of 20 sweeps, 19 should have 1 in their interval of 95 %; of 5, all or all but one have it in 98 of 100 cases."""
    found = check_clock.ratios("again", SWEEPS, ["data=digits", "task.batch_size=512", "task.model.hidden=[1024]"])
    inside = (found["low"] <= 1) & (found["high"] >= 1)
    assert inside.sum() >= SWEEPS - 1, found
    assert abs(found["ratio"].median() - 1) <= 0.02
