import math

import numpy as np
import pytest

from mpcompare.race.intervals import interval, ratio, unpaired_ratio


@pytest.mark.slow
def test_the_interval_holds_the_median_in_95_of_100_samples_also_where_they_are_few():
    rng = np.random.default_rng(1)
    for n in (10, 20):
        inside = 0
        for _ in range(400):
            found = interval(rng.lognormal(0, 0.02, n))
            inside += found.low <= 1 <= found.high
        # 95 % of 400 is 380 +- 4.4; the plain percentile bootstrap covers about 92 %, 368.
        assert inside >= 375


def test_one_wild_block_does_not_move_it():
    values = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0]
    quiet, disturbed = interval(values), interval([*values[:-1], 5.0])
    assert disturbed.median == pytest.approx(quiet.median, abs=0.01)
    assert disturbed.half_width < 0.03


def test_the_same_values_give_the_same_interval():
    assert interval(range(1, 8)) == interval(range(1, 8))


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 5, [*[1.0] * 9, math.nan], [*[1.0] * 9, math.inf]])
def test_too_few_values_have_no_interval(values):
    found = interval(values)
    assert found.half_width == math.inf
    assert math.isnan(found.low)


def test_drift_cancels_in_a_ratio_formed_round_by_round():
    drift = np.linspace(1, 3, 20)  # the machine becomes three times slower
    noise = np.random.default_rng(0).lognormal(0, 0.002, (2, 20))
    a, b = 1.05 * drift * noise[0], drift * noise[1]
    paired, unpaired = ratio(a, b), unpaired_ratio(a, b)
    assert paired.low < 1.05 < paired.high
    assert paired.half_width < 0.005
    assert unpaired.half_width > 0.2
