"""Running statistics after the first step, and after a skipped one, beside the oracle's."""

import math
from collections.abc import Iterator
from dataclasses import replace

from mpcompare.verdict.judge.causes import Errors
from mpcompare.verdict.judge.check import Case, Check
from mpcompare.verdict.judge.limits import as_measure, stored_coarsely, tensor_limit


def checks(case: Case) -> Iterator[Check]:
    """Yields a check for each buffer in the passes ``first`` and ``overflow``, both of whose first steps are forward
    the oracle's."""
    yield from _of_pass(case, "first", "after the first step")
    yield from _of_pass(case, "overflow", "after a skipped step")


def _of_pass(case: Case, where: str, after: str) -> Iterator[Check]:
    """Yields the checks of one pass: as for gradients, but that buffers stay in fp32, unless a backend promises other
    weights. The numbers that they are made of may be rounded, and they may not."""
    run, reference = case.run.findings.drives.get(where), case.reference.findings.drives.get(where)
    if not (run and reference and run.buffers):
        return
    for name, e in reference.buffers.items():
        if e is None:
            continue
        rounding = case.reference.findings.rounding.get(name)
        measure = as_measure(case, replace(e, largest=0.0), rounding)
        limit = tensor_limit(case.run, measure, rounding) if measure else math.nan
        error = Errors(run.buffers.get(name), limit + stored_coarsely(case.run) * e.norm)
        if not math.isnan(error.limit):
            because = f"{name} is off by {error.error / max(e.norm, 1e-300):.1e} of its norm {after}"
            yield Check(f"buffer {name} {after}", error.error, error.limit, "running statistics", because)
