"""Is a step of zeros finite?

- *Value.* Loss and gradients of a step with weights and inputs of 0, where each norm sees a row without a variance.
- *Limit.* Finite where they are in fp32 and in the reference. Nothing overflows among zeros, so there is no tolerance.
"""

import math
from dataclasses import dataclass, field

from mpcompare.verdict.judge.check import Case, Check, Checks

WHERE = "where weights and inputs are 0, as in a row of padding"


@dataclass(frozen=True)
class Padding:
    """A step at weights and inputs of 0."""

    loss: float  # the loss, as the backend says
    exact_loss: float  # the loss of a few rows in fp32, a finite number
    finite: dict[str, bool] = field(default_factory=dict)  # whether each tensor that is finite in fp32 is finite


def checks(case: Case) -> Checks:
    """Yields a check of the loss, and of each gradient."""
    run, reference = case.found("padding")
    if case.is_reference or run is None or reference is None:
        return
    if math.isfinite(reference.loss):
        because = f"{WHERE}, the loss is {run.loss:.6g}, and {run.exact_loss:.6g} in fp32: 0 / 0, as of a norm without "
        because += "its eps, or with one that is 0 in 16 bits"
        yield Check("loss of padding", float(not math.isfinite(run.loss)), 0, "normalization", because)
    for name, finite in run.finite.items():
        if reference.finite.get(name):
            because = f"{WHERE}, the gradient of {name} holds inf or NaN, and none in fp32: 0 / 0 in backward"
            yield Check("gradient of padding", float(not finite), 0, "normalization", because, tensor=name)
