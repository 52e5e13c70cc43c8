"""Did a parameter without a gradient move?

- *Value.* Whether a parameter moved in an update in which it has no gradient.
- *Limit.* No bit may change. torch's optimizers leave such a parameter out; with a gradient of 0 it would decay.
"""

from mpcompare.verdict.judge.aged import AGED
from mpcompare.verdict.judge.check import Case, Check, Checks
from mpcompare.verdict.judge.optimizer import LAST


def checks(case: Case) -> Checks:
    """Yields a check for each parameter that has no gradient in an update: no bit of it may change."""
    findings = case.run.findings
    later = {AGED: findings.aged, LAST: findings.trained}
    drives = {**findings.drives, **{where: found.drive for where, found in later.items() if found}}
    for where, drive in drives.items():
        for number, tensors in enumerate(drive.idle, start=1):
            for name, moved in tensors.items():
                because = f"{name} has no gradient in this update, and moves all the same: a gradient of 0 lets it "
                because += "decay, and its momentum move it"
                place = f"update {number} of pass {where} without a gradient"
                yield Check(place, moved, 0, "unused parameter", because, tensor=name)
