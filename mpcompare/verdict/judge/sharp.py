"""Is each operation right at weights at which nothing is nearly linear?

- *Value.* As `layers`, at weights at which nothing is nearly linear.
- *Limit.* As `layers`, at these weights.
"""

from mpcompare.precision import FORMATS, PRECISIONS
from mpcompare.verdict.judge.check import Case, Check, Checks
from mpcompare.verdict.judge.layers import of_replay


def checks(case: Case) -> Checks:
    """Yields the checks of the step, and one that it is finite where the reference's step is. In fp16 a right run may
    overflow alone, because it may hold in fp16 what the reference holds in fp32."""
    yield from of_replay(case, "sharp")
    own, others = (each.findings.replays for each in (case.run, case.reference))
    is_known = "first" in own and not {"sharp"} & {*case.run.findings.stopped, *case.run.findings.hidden}
    has_range = PRECISIONS[case.run.precision].storage.maximum >= FORMATS["bf16"].maximum
    if is_known and has_range and "sharp" in others:
        because = f"gradients are inf or NaN at sharp weights, and those of {case.reference.name} are finite"
        yield Check("finite at sharp weights", float("sharp" not in own), 0, "overflow", because)
