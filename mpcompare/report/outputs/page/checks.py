"""The checks of a run as bars: each value over its limit, on a logarithmic axis."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpcompare.report.comparison import Entry
from mpcompare.verdict.judge.check import Check

LOWEST, HIGHEST = -3, 2  # the powers of ten of value over limit between which bars end
SHOWN = 40  # bars of a kind and run: a network of 200 tensors has thousands, which no browser draws at once
NEAR = 0.5  # a share of a limit: a value from here on is drawn darker, and stays where only such values are shown


@dataclass(frozen=True)
class Bar:
    """A check as it is drawn. ``anchor`` is the id of its element, and the fragment of a link to it:
    ``check=RUN/NAME`` without spaces."""

    check: Check
    anchor: str

    @cached_property
    def ratio(self) -> float:
        """The value over its limit: 0 where both are 0, inf where only the limit is 0, NaN where one is NaN."""
        value, limit = self.check.value, self.check.limit
        if limit == math.inf and self.check.passed:
            return 0.0
        if limit == 0:
            return 0.0 if value == 0 else math.nan if math.isnan(value) else math.inf
        return value / limit

    @property
    def length(self) -> float:
        """The end of the bar, in percent of the axis from ``LOWEST`` to ``HIGHEST``; 100 for NaN."""
        if math.isnan(self.ratio):
            return 100.0
        power = math.log10(self.ratio) if 0 < self.ratio < math.inf else math.copysign(math.inf, self.ratio - 0.5)
        return round(100 * (min(max(power, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST), 1)

    @property
    def exact(self) -> bool:
        """Whether the limit is 0, and nothing else was found."""
        return self.check.limit == 0 and self.check.passed

    @property
    def text(self) -> str:
        """The ratio in digits; ``exact`` where the limit is 0, and 0 was found."""
        if self.exact:
            return "exact"
        if not math.isfinite(self.ratio):
            return "beyond" if self.ratio == math.inf else "NaN"
        if 0.005 <= self.ratio < 1000:
            return f"{self.ratio:.3g}" if 0.995 <= self.ratio < 1.005 else f"{self.ratio:.2f}"  # not 1.00 for 0.997
        return f"{self.ratio:.0e}" if self.ratio else "0"

    @property
    def state(self) -> str:
        """``failed``, ``near`` its limit, or ``far`` from it."""
        if not self.check.passed:
            return "failed"
        return "near" if self.ratio >= NEAR and not self.check.tight else "far"


@dataclass(frozen=True)
class Kind:
    """The bars of a run's checks of one kind, in the order in which they were made."""

    name: str
    bars: Sequence[Bar]

    @property
    def exact(self) -> list[Bar]:
        """The bars that one line sums up."""
        return [bar for bar in self.bars if bar.exact]

    @cached_property
    def shown(self) -> list[Bar]:
        """The bars that are drawn: first the failed ones, in their order, then the ones nearest to their limits."""
        bars = [bar for bar in self.bars if not bar.exact]

        def place(bar: Bar) -> tuple[bool, bool, float]:
            return bar.check.passed, bar.check.passed and bar.check.tight, -bar.ratio if bar.check.passed else 0.0

        kept = {bar.anchor for bar in sorted(bars, key=place)[:SHOWN]}
        return [bar for bar in bars if bar.anchor in kept]

    @property
    def left_out(self) -> str:
        """The bars that are not drawn, in words; empty where all are."""
        kept = {bar.anchor for bar in self.shown}
        others = [bar for bar in self.bars if not bar.exact and bar.anchor not in kept]
        if not others:
            return ""
        failed = sum(not bar.check.passed for bar in others)
        nearest = max(others, key=lambda bar: bar.ratio).text
        words = f"{failed} that failed, too" if failed else f"none nearer to its limit than {nearest}"
        return f"{len(others)} more are in verdict.json: {words}"

    @property
    def differs(self) -> bool:
        """Whether a check failed or is near to its limit."""
        return any(bar.state != "far" for bar in self.bars)


@dataclass(frozen=True)
class CheckedRun:
    """A run with its checks; there are none where it was not examined."""

    entry: Entry

    @cached_property
    def bars(self) -> Sequence[Bar]:
        return bars(self.entry.run.name, self.entry.verdict.checks if self.entry.verdict else [])

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of checks, in the order in which they were made."""
        kinds: dict[str, list[Bar]] = {}
        for bar in self.bars:
            kinds.setdefault(bar.check.kind, []).append(bar)
        return [Kind(name, bars) for name, bars in kinds.items()]

    @property
    def first_failed(self) -> Bar | None:
        """The bar of the first check that failed, which decides; None where all passed.

        Nearness is said of no run: some limits bound the worst of many roundings, and correct runs come near to them.
        """
        return next((bar for bar in self.bars if not bar.check.passed), None)

    @property
    def failed(self) -> int:
        """The number of checks that failed."""
        return sum(not bar.check.passed for bar in self.bars)


def bars(run: str, checks: Sequence[Check]) -> list[Bar]:
    """Returns the bars of a run's checks; each has an anchor of its own."""
    anchors: dict[str, int] = {}
    made = []
    for check in checks:
        anchor = f"check={_word(run)}/{_word(check.name)}"
        anchors[anchor] = anchors.get(anchor, 0) + 1
        made.append(Bar(check, anchor if anchors[anchor] == 1 else f"{anchor}-{anchors[anchor]}"))
    return made


def _word(text: str) -> str:
    return re.sub(r"[^\w./=-]+", "-", text).strip("-")
