"""The contents of a report, from which every output is made."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpcompare.report import formats
from mpcompare.report.comparison import Comparison, Entry, Row
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word

MOST_DRAWN = 12  # comparisons of a report with figures: each takes a second to draw, and some hundred kilobytes
UNDRAWN = (
    f"More than {MOST_DRAWN} comparisons have no figures: mpcompare report RUN RUN draws the figures of some runs."
)


@dataclass(frozen=True)
class Report:
    """The runs of a report, compared and judged."""

    comparisons: Sequence[Comparison]  # in the order of their first runs; every run is in one of them
    baseline: str  # the backend that was asked for as the baseline, whether or not it is among the runs
    # the formats, among :data:`formats.FORMATS`, in which figures and the table are written
    formats: Sequence[str] = formats.DEFAULT

    @property
    def entries(self) -> list[Entry]:
        """The runs of all comparisons."""
        return [entry for comparison in self.comparisons for entry in comparison.entries]

    @property
    def rows(self) -> list[Row]:
        """A row of a table for each run."""
        return [row for comparison in self.comparisons for row in comparison.rows]

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdicts on the finished runs, by their names."""
        return {entry.run.name: entry.verdict for entry in self.entries if entry.verdict}

    @property
    def finished(self) -> list[Comparison]:
        """The comparisons in which a run finished."""
        return [comparison for comparison in self.comparisons if comparison.finished]

    @property
    def is_drawn(self) -> bool:
        """Whether there are figures: the tables of very many comparisons say more."""
        return len(self.finished) <= MOST_DRAWN

    @property
    def has_baseline(self) -> bool:
        """Whether any run, finished or not, is of the baseline's backend."""
        return any(entry.run.result.backend == self.baseline for entry in self.entries)

    @property
    def differs(self) -> bool:
        """Whether the verdict on any run is that it differs from its reference, or its examination stopped with an
        error."""
        return any(v.word is Word.DIFFERS or (v.word is Word.NOT_EXAMINED and v.cause) for v in self.verdicts.values())
