"""The harness on this machine: two equal entrants come out equal."""

import check_clock
import pandas as pd
import pytest

OVERRIDES = ["data=digits", "task.batch_size=512", "task.model.hidden=[1024]"]


def has_one(found: pd.DataFrame) -> int:
    return int(((found["low"] <= 1) & (found["high"] >= 1)).sum())


@pytest.mark.slow
@pytest.mark.quiet
def test_a_backend_that_races_itself_is_as_fast_as_itself():
    """An interval of 95 % should hold 1 in 19 of 20 sweeps.

    Then all or all but one of 5 sweeps hold it in 977 of 1,000 tests. Fewer do in the other 23, which is once in 43
    landings: 10 more sweeps decide, of which all or all but one hold it in 914 of 1,000 cases. So 2 of 1,000 tests of a
    right harness fail.
    """
    found = check_clock.ratios("again", 5, OVERRIDES)
    if has_one(found) < len(found) - 1:
        found = check_clock.ratios("again", 10, OVERRIDES)
    assert has_one(found) >= len(found) - 1, found
    assert abs(found["ratio"].median() - 1) <= 0.02
