"""A finished run of a comparison with what is said of it: what the figures of the verdict draw."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpcompare.records import Run
from mpcompare.report.comparison import Comparison, Entry, loss_difference
from mpcompare.report.figures.kit import COLOURS, finished, line
from mpcompare.verdict.judge.checks import loss_noise
from mpcompare.verdict.judge.verdict import Verdict


@dataclass(frozen=True)
class Judged:
    """A finished run, what is said of it, and the run that it was compared with.

    Attributes:
        place: among the finished ones, from 0: its colour is the same in every figure.
        reference: None where the run was not judged; itself for a reference.
    """

    entry: Entry
    place: int
    verdict: Verdict
    reference: Entry | None

    @property
    def run(self) -> Run:
        return self.entry.run

    @property
    def numerics(self) -> dict[str, Any]:
        return self.run.numerics or {}

    @property
    def is_reference(self) -> bool:
        return self.reference is self.entry

    @property
    def colour(self) -> str:
        return COLOURS[self.place % 7]

    @property
    def line(self) -> dict[str, Any]:
        return line(self.place)

    def limit(self, check: str) -> float:
        """NaN if the run was not checked for that."""
        return next((c.limit for c in self.verdict.checks if c.name == check), math.nan)

    @property
    def gradients(self) -> dict[str, dict[str, Any]]:
        """Of the first step, by tensor."""
        return self.numerics.get("first", {}).get("gradients", {})

    @property
    def difference(self) -> np.ndarray:
        """``|loss - reference's loss|`` step by step; empty if the run was not judged."""
        return loss_difference(self.run, self.reference.run) if self.reference else np.array([])

    @property
    def noise(self) -> np.ndarray | None:
        """``checks.loss_noise`` of a reference; None for other runs, and where it was not measured."""
        return loss_noise(self.run) if self.is_reference and self.numerics.get("noise") else None


def with_verdicts(comparison: Comparison, verdicts: Mapping[str, Verdict]) -> list[Judged]:
    entries = {entry.run.name: entry for entry in finished(comparison)}
    found = []
    for place, (name, entry) in enumerate(entries.items()):
        verdict = verdicts.get(name, Verdict("not comparable"))
        found.append(Judged(entry, place, verdict, entries.get(verdict.reference or "")))
    return found


def references(runs: Sequence[Judged]) -> list[Judged]:
    return [run for run in runs if run.is_reference]


def compared(reference: Judged, runs: Sequence[Judged]) -> list[Judged]:
    """The runs that were compared with ``reference``."""
    return [run for run in runs if run.reference is reference.entry and not run.is_reference]
