"""The errors of gradients in the first step and their limits, as the figure of gradient errors draws them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpcompare.report.figures.judged import Judged, compared, references
from mpcompare.verdict.judge.errors import relative_error
from mpcompare.verdict.judge.gradients import FIRST

NOTHING = 1e-10  # times the largest gradient's norm: a smaller one is the rounding of float64 alone


@dataclass(frozen=True)
class Series:
    """The gradients of one run."""

    run: Judged
    # ``||gradient - exact|| / ||exact||`` by tensor; inf where the gradient is missing or no number, NaN where the run
    # shows none
    errors: np.ndarray
    limits: np.ndarray  # of ``errors``; NaN where there is none

    @property
    def ratios(self) -> np.ndarray:
        """``errors`` over ``limits``."""
        return self.errors / self.limits

    @property
    def label(self) -> str:
        """The label of the run, and why it has no errors."""
        run = self.run
        without = "" if run.gradients else ": shows none" if run.findings else ": not examined"
        return run.entry.label + (" (reference)" if run.is_reference else "") + without


@dataclass(frozen=True)
class GradientTable:
    """The gradients of all runs of a comparison."""

    tensors: list[str]  # the names, in the order of the network
    # the tensors that the loss does not depend on, such as a bias before a norm, which are left out: relative errors
    # say nothing of them
    vanishing: list[str]
    series: list[Series]  # those with one reference stand together

    @property
    def remark(self) -> str:
        """The tensors that are left out; empty if none are."""
        names = ", ".join(self.vanishing[:3]) + (", ..." if len(self.vanishing) > 3 else "")
        return f"not drawn, exactly 0 ({len(self.vanishing)}): {names}" if names else ""


def gradients_of(runs: Sequence[Judged]) -> GradientTable:
    """Returns the errors of the gradients of these runs, which are all of one comparison."""
    named = list(dict.fromkeys(tensor for run in runs for tensor in run.gradients))
    vanishing = _vanishing(runs, named)
    tensors = [tensor for tensor in named if tensor not in vanishing]
    owners = [run.entry for run in references(runs)]
    order = sorted(runs, key=lambda r: owners.index(r.reference) if r.reference in owners else len(owners))
    series = [
        Series(
            run,
            np.array([relative_error(run.gradients.get(t)) if run.gradients else math.nan for t in tensors]),
            np.array([_relative_limit(run, runs, tensor) for tensor in tensors]),
        )
        for run in order
    ]
    return GradientTable(tensors, vanishing, series)


def _vanishing(runs: Sequence[Judged], tensors: Sequence[str]) -> list[str]:
    norms = {tensor: max(run.norm(tensor) for run in runs) for tensor in tensors}
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    return [tensor for tensor, norm in norms.items() if norm < NOTHING * max(finite, default=0.0)]


def _relative_limit(run: Judged, runs: Sequence[Judged], tensor: str) -> float:
    """The limit of a run's error, or, for a reference, of the runs that were compared with it; NaN if there is none."""
    reference = next((other for other in runs if other.entry is run.reference), run)
    norm = run.norm(tensor) or reference.norm(tensor)  # of a gradient that is missing
    judges = compared(run, runs) if run.is_reference else [run]
    limits = [judge.limit(("gradients", "layers"), f"gradient {FIRST}", tensor) for judge in judges]
    return next((limit / norm for limit in limits if math.isfinite(limit) and norm), math.nan)
