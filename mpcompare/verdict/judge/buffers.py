"""Running statistics after the first step beside the oracle's."""

import math
from collections.abc import Iterator
from dataclasses import replace

from mpcompare.verdict.judge.causes import Errors
from mpcompare.verdict.judge.check import Case, Check
from mpcompare.verdict.judge.limits import stored_coarsely, tensor_limit


def checks(case: Case) -> Iterator[Check]:
    """Yields a check for each buffer: as for gradients, but that buffers stay in fp32, unless a backend promises
    other weights. The numbers that they are made of may be rounded, and they may not."""
    run, reference = case.run.findings.first.buffers, case.reference.findings.first.buffers
    if case.is_reference or not run:
        return
    for name, e in reference.items():
        if e is None:
            continue
        rounding = case.reference.findings.rounding.get(name)
        limit = tensor_limit(case.run, replace(e, largest=0.0), rounding)
        error = Errors(run.get(name), limit + stored_coarsely(case.run) * e.norm)
        if not math.isnan(error.limit):
            because = f"{name} is off by {error.error / max(e.norm, 1e-300):.1e} of its norm after the first step"
            yield Check(f"buffer {name}", error.error, error.limit, "running statistics", because)
