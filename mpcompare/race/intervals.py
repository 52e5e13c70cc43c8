"""Intervals of measured times: a median with a 95 % bootstrap interval, and ratios formed pair by pair."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special  # scipy.stats takes half a second to import

from mpcompare.numerals import as_ratio


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % bootstrap interval, whose ends are nan where there are too few values."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """``1.38 (1.37-1.39)``, or ``1.38`` where there is no interval."""
        span = "" if math.isnan(self.low) else f" ({as_ratio(self.low)}-{as_ratio(self.high)})"
        return as_ratio(self.median) + span

    @property
    def half_width(self) -> float:
        """The distance from the median to the farther end, relative to the median; inf where there is no interval."""
        if math.isnan(self.low):
            return math.inf
        return max(self.high - self.median, self.median - self.low) / self.median


RESAMPLES = 4000
MIN_VALUES = 6  # with five normal values the interval holds the median in 93 of 100 samples, with three in 73


def interval(values: Iterable[float]) -> Interval:
    """Returns the median of independent ``values`` with its interval: the expanded percentile bootstrap.

    The plain percentile bootstrap is too narrow for few values: it covers about 90 % where it says 95. Taking its
    quantiles at ``Phi(-sqrt(n / (n - 1)) t_{n-1})`` mends that (Hesterberg, "What Teachers Should Know About the
    Bootstrap", The American Statistician 69(4), 2015, section 3.3).
    """
    x = np.asarray(list(values), dtype=float)
    n = len(x)
    if n < MIN_VALUES or not np.isfinite(x).all():
        return Interval(float(np.median(x)) if n else math.nan, math.nan, math.nan)
    drawn = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))  # seeded: the same values, the same interval
    medians = np.median(x[drawn], axis=1)
    tail = special.ndtr(-math.sqrt(n / (n - 1)) * special.stdtrit(n - 1, 0.975))
    low, high = np.quantile(medians, (tail, 1 - tail))
    return Interval(float(np.median(x)), float(low), float(high))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Returns the ratio of two entrants' times, formed round by round: drift of the machine hits both and cancels."""
    return interval(np.asarray(numerator, dtype=float) / np.asarray(denominator, dtype=float))


def unpaired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Returns the ratio of medians of times that were not taken side by side.

    Its interval is wider, and blind to drift between the two.
    """
    a, b = interval(numerator), interval(denominator)
    return Interval(a.median / b.median, a.low / b.high, a.high / b.low)
