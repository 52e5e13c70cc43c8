"""Does each update follow from its gradients?

- *Value.* `w' - (w + change)`, element by element, for at most `65536` elements of each tensor. The change is replayed
  in float64 on the gradients that the backend shows.
- *Limit.* The limit of an update. Two updates are checked if the schedule changes the rate, three if the optimizer
  keeps moments, five more with loss scaling.
"""

from collections.abc import Mapping

from mpcompare.precision import PRECISIONS
from mpcompare.verdict.judge.check import Case, Check, Checks, Examined, listed
from mpcompare.verdict.judge.drive import Drive

LAST = "last"  # the pass in which the trained backend takes its next step


def checks(case: Case) -> Checks:
    """Yields each update compared with the optimizer's in fp32, in units of what its roundings allow."""
    yield from of_passes(case.run, case.run.findings.drives)


def of_passes(run: Examined, drives: Mapping[str, Drive]) -> Checks:
    """Yields the checks of some passes, which share a cause."""
    cause, how = _known_mistake(drives)
    digits_tell = PRECISIONS[run.findings.precision].is_16_bit and not run.findings.promises.coarse
    for where, drive in drives.items():
        for number, update in enumerate(drive.updates, start=1):
            left_out = any(e.left > 0.5 for e in update.values())  # so may a 1.0 be
            for name, e in update.items():
                why, because = "optimizer", f"the update of {name} is {e.slope:.6g} times what its gradients make"
                if e.short > 0.5 and digits_tell and not (left_out and e.lost == 1):
                    why = "no master weights"
                    because = f"{name} has the digits of a 16-bit number; {100 * e.lost:.1f} % of its updates are lost"
                elif cause:
                    why, because = cause, f"the update of {name} is {how}"
                elif e.lost == 1 and e.lost_in_fp32 < 1:
                    why, because = "update left out", f"the update leaves {name} as it is, bit for bit"
                yield Check(f"update {number} of pass {where}", e.excess, 1, why, because, tight=True, tensor=name)
        for number, step in enumerate(drive.steps, start=1):
            if not step.should_skip and not step.skipped and not step.at_rest:
                because = f"step {number} of pass {where} leaves all weights as they are"
                why = cause or "update left out"
                yield Check(f"weights in step {number} of pass {where}", float(not step.moved), 0, why, because)


def _known_mistake(drives: Mapping[str, Drive]) -> tuple[str, str]:
    """Returns the cause, and how the updates are made: by the first mistake that makes all wrong updates in every pass.
    If no mistake does, the optimizer's moments may not have been 0 at first, or may have only the digits of 16-bit
    numbers. Both are empty if nothing is known."""
    wrong = {where: drive for where, drive in drives.items() if drive.known_mistakes}
    known = [drive.known_mistakes for drive in wrong.values()]
    for made, mistake in known[0].items() if known else ():
        if all(made in mistakes and mistakes[made].excess <= 1 for mistakes in known):
            return mistake.cause, f"made {made}"
    for drive in wrong.values():
        if drive.early:
            because = "held other numbers than 0 after skipped steps, before the first update"
            return "moments", f"not the optimizer's: {listed(drive.early)} {because}"
    for where, drive in wrong.items():
        later = len(drive.updates) > 1 or where == LAST  # a momentum begins as a gradient, with no more digits than it
        short = [kind for kind, share in drive.digits.items() if share > 0.5 and (later or kind != "momentum_buffer")]
        if short:
            because = f"what is remembered of it ({listed(short)}) has the digits of 16-bit numbers"
            return "moments", f"not the optimizer's: {because}"
    return "", ""
