"""A finished run with its verdict, as the figures of the verdict draw it. Only this file reads the findings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpcompare.report.comparison import Entry
from mpcompare.report.contents import Report
from mpcompare.report.runs import Run
from mpcompare.report.verdicts import examined_of
from mpcompare.verdict.findings import Findings
from mpcompare.verdict.judge.errors import Errors
from mpcompare.verdict.judge.trajectories import loss_noise

Counts = Mapping[str, Sequence[int]]  # by layer or parameter: the number of zeros, and of each exponent
Exponents = Mapping[str, Counts]  # by step, "first" and "last"


@dataclass(frozen=True)
class Judged:
    """A finished run, and the run that it was compared with."""

    entry: Entry
    place: int  # its place among the finished runs, from 0: its colour is the same in every figure
    reference: Entry | None  # None where the run was not judged; itself for a reference

    @property
    def run(self) -> Run:
        return self.entry.run

    @property
    def precision(self) -> str:
        return self.run.result.precision

    @property
    def is_reference(self) -> bool:
        return self.reference is self.entry

    def limit(self, kinds: Sequence[str], place: str, tensor: str = "") -> float:
        """Returns the limit of a check of one of these kinds; NaN if the run was not checked for that."""
        checks = self.entry.verdict.checks if self.entry.verdict else []
        alike = (c for c in checks if c.kind in kinds and (c.place, c.tensor) == (place, tensor))
        return next((check.limit for check in alike), math.nan)

    @property
    def findings(self) -> Findings | None:
        """None where the run was not examined."""
        return self.run.findings

    @property
    def gradients(self) -> Errors:
        """Errors of the gradients in the first step, by tensor: by the forced replay, or else by the whole network's
        oracle; empty where none are known."""
        if (findings := self.findings) is None:
            return {}
        if (replay := findings.replays.get("first")) is None:
            return findings.first.gradients
        return {name: replay.gradients[name] for name in findings.layers if name in replay.gradients}

    def norm(self, tensor: str) -> float:
        """Returns the norm of the exact gradient in the first step; 0 where it is not known."""
        error = self.gradients.get(tensor)
        return error.norm if error else 0.0

    @property
    def first_scale(self) -> float:
        """The loss scale of the first step, of the try whose gradients were finite where there was one."""
        scale = self.findings.first.first_scale if self.findings else 1.0
        return scale if 0 < scale < math.inf else 1.0

    def counts_exponents(self, when: str = "first") -> bool:
        """Returns whether exponents were counted in the first step, or after training (``last``)."""
        return bool(self.findings and self.findings.exponents.get(when))

    def exponents(self, group: str) -> Exponents:
        """Returns the counts of a group of tensors, such as ``activations``."""
        counted = self.findings.exponents if self.findings else {}
        return {when: groups.get(group, {}) for when, groups in counted.items()}

    def is_bias(self, tensor: str) -> bool:
        """Returns whether a tensor is the bias of its layer."""
        layer = self.findings.layers.get(tensor) if self.findings else None
        return layer is not None and layer.part.startswith("bias")

    def kind(self, tensor: str) -> str:
        """Returns the class of the layer that holds a tensor and the tensor's name in it; empty where not known."""
        layer = self.findings.layers.get(tensor) if self.findings else None
        return f"{layer.kind} {layer.part}" if layer else ""

    @property
    def noise(self) -> np.ndarray | None:
        """``loss_noise`` of a reference; None for other runs, and where it was not measured."""
        examined = examined_of(self.run) if self.is_reference and self.noise_runs else None
        return loss_noise(examined) if examined else None

    @property
    def noise_runs(self) -> int:
        """The number of runs that measured the noise."""
        return len(self.findings.noise) if self.findings else 0


def judged(report: Report) -> list[list[Judged]]:
    """Returns the finished runs of each comparison in which any run finished."""
    return [
        [Judged(entry, place, comparison.reference(entry)) for place, entry in enumerate(comparison.finished)]
        for comparison in report.finished
    ]


def compared(reference: Judged, runs: Sequence[Judged]) -> list[Judged]:
    """Returns the runs that were compared with ``reference``."""
    return [run for run in runs if run.reference is reference.entry and not run.is_reference]
