"""Sentences that explain the page with the numbers of its own runs."""

import math

from mpcompare.report.comparison import Comparison
from mpcompare.report.contents import Verdicts
from mpcompare.report.signs import word


def lines(comparison: Comparison, verdicts: Verdicts) -> list[str]:
    """Returns a line for each thing that a reader meets first; the example is a run that is no baseline."""
    entries = comparison.finished
    example = next((entry for entry in entries if not entry.is_baseline and entry.baseline), None)
    said = ["Each run trained the same network on the same batches; red is what differs, and stands first."]
    if example is None:
        return said
    label, baseline = example.label, comparison.label(example.baseline)
    time, memory = example.time_ratio, example.memory_ratio
    if math.isfinite(time.low):
        said.append(
            f"Time: a step of {label} takes {time.median:.2f} of {baseline}'s time. The true ratio lies between "
            f"{time.low:.2f} and {time.high:.2f} in 95 of 100 such measurements. Below 1 is faster. "
            "It is the median over pairs of blocks that took turns, and may differ from the ratio of the two medians."
        )
    else:
        said.append(f"Time: the ratio of {label} has no interval here, so it is not shown.")
    said.append(f"Memory: a step of {label} needs {memory:.2f} of {baseline}'s peak. Below 1 is smaller.")
    if verdict := verdicts.get(example.run.name):
        failed = sum(not check.passed for check in verdict.checks)
        said.append(
            f'Verdict: {label} is "{word(example, verdict)}": {failed} of its {len(verdict.checks)} checks failed. '
            "A check compares one number with a limit."
        )
    return said
