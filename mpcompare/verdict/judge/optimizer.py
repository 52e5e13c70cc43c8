"""Updates beside the optimizer's own, and the known mistake that makes them where they are not these."""

from collections.abc import Iterator, Mapping

from mpcompare.clipping import USUAL_NORMS
from mpcompare.precision import PRECISIONS
from mpcompare.verdict.findings import Drive
from mpcompare.verdict.judge.check import Case, Check, Examined, listed

LAST = "last"  # the pass in which the trained backend takes its next step
MIDWAY = "midway"  # an update in the middle of training

# By name in verdict/examine/known_mistakes.py: the cause, and how the updates are made.
KNOWN_MISTAKES = {
    "schedule late": ("schedule", "at the learning rate of the update before"),
    "schedule late from 0": ("schedule", "at the learning rate of the update before, and the first one at 0"),
    "schedule early": ("schedule", "at the learning rate of the next update"),
    "schedule of the first update": ("schedule", "at the learning rate of the first update"),
    "schedule counts skipped steps": ("schedule", "at a learning rate that skipped steps advance, too"),
    "schedule left out": ("schedule", "at the optimizer's learning rate, whatever the schedule"),
    "schedule counts micro-batches": ("schedule", "at a learning rate that every micro-batch advances"),
    "not clipped": ("clip", "from gradients that are not clipped"),
    **{
        f"clipped to {norm:g}": ("clip", f"from gradients that are clipped to a norm of {norm:g}, as nobody asked for")
        for norm in USUAL_NORMS
    },
    "gradients over the loss scale": ("gradient scaled", "from gradients that are divided by the loss scale once more"),
    "gradients times the loss scale": ("gradient scaled", "from gradients that are multiplied by the loss scale"),
    "lr in fp16": ("optimizer", "at a learning rate that is rounded to fp16"),
    "lr in bf16": ("optimizer", "at a learning rate that is rounded to bf16"),
    "no momentum": ("momentum", "without momentum"),
    "the other momentum": ("momentum", "with Nesterov's momentum where it is not asked for, or the reverse"),
    "momentum dampened": ("momentum", "with gradients times 1 - momentum, but for the first"),
    "momentum a mean": ("momentum", "with gradients times 1 - momentum"),
    "lr in the momentum": ("momentum", "with the learning rate in the momentum, where a schedule changes it too late"),
    "divided by a rate of 0": ("optimizer", "with a division by a learning rate of 0, which is NaN where v is 0"),
    "eps inside the root": ("eps", "with eps inside the root"),
    "eps 0": ("eps", "with eps = 0, as fp16 has it"),
    "eps before the correction": ("eps", "with eps added before the bias correction"),
    "no bias correction": ("bias correction", "without bias correction"),
    "no bias correction of m": ("bias correction", "without bias correction of m"),
    "no bias correction of v": ("bias correction", "without bias correction of v"),
    "bias correction of the first update": ("bias correction", "with the bias correction of the first update"),
    "bias correction counts skipped steps": ("bias correction", "with a bias correction that counts skipped steps"),
    "bias correction counts updates without a gradient": (
        "bias correction",
        "with a bias correction that counts updates in which there is no gradient of it",
    ),
    "bias correction one update ahead": ("bias correction", "with the bias correction of the next update"),
    "bias correction the wrong way round": ("bias correction", "with both means multiplied by what should divide them"),
    "mean corrected in place": (
        "bias correction",
        "with a mean of the gradients that is corrected where it is kept, and corrected again in the next update",
    ),
    "bias correction in the rate": (
        "bias correction",
        "with the bias correction in the learning rate, which the decay is multiplied by, too",
    ),
    "decay times the loss scale": ("weight decay", "with a decay that is multiplied by the loss scale"),
    "decay over the loss scale": ("weight decay", "with a decay that is divided by the loss scale"),
    "betas swapped": ("optimizer", "with its betas swapped"),
    "moments of this gradient": ("moments", "from this gradient alone: m or v, or both, forget the gradients before"),
    "gradients times a power of two": ("gradient scaled", "from gradients that are multiplied by a power of two"),
    "no decay": ("weight decay", "without weight decay"),
    "decay of the 16-bit weights": ("weight decay", "with a decay of the 16-bit weights"),
    "decay not times lr": ("weight decay", "with a decay that is not multiplied by the learning rate"),
    "decay at the first lr": ("weight decay", "with a decay at the optimizer's learning rate, whatever the schedule"),
    "decay in the gradient": ("weight decay", "with the decay in the gradient, as Adam has it"),
    "decay after the update": ("weight decay", "with a decay of the weight that is already updated"),
    "decay beside the gradient": ("weight decay", "with the decay beside the gradient, as AdamW has it"),
    "decay of no group": ("parameter groups", "with the weight decay of parameters that are in no group"),
    "rate of no group": ("parameter groups", "at the learning rate of parameters that are in no group"),
    "groups left out": ("parameter groups", "as if there were no parameter groups"),
    "values of another group": ("parameter groups", "with the values of another parameter group"),
    "another rate": ("schedule", "at another learning rate than that of the schedule, right apart from that"),
}


def checks(case: Case) -> Iterator[Check]:
    """Yields each update beside the optimizer's in fp32, in units of what its roundings allow."""
    yield from of_passes(case.run, case.run.findings.drives)


def of_passes(run: Examined, drives: Mapping[str, Drive]) -> Iterator[Check]:
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
                    because = f"{name} has the digits of a 16-bit number; {e.lost:.1%} of its updates are lost"
                elif cause:
                    why, because = cause, f"the update of {name} is {how}"
                elif e.lost == 1 and e.lost_in_fp32 < 1:
                    why, because = "update left out", f"the update leaves {name} as it is, bit for bit"
                yield Check(f"update {number} of pass {where}, {name}", e.excess, 1, why, because, tight=True)
        for number, step in enumerate(drive.steps, start=1):
            if not step.should_skip and not step.skipped:
                because = f"step {number} of pass {where} leaves all weights as they are"
                why = cause or "update left out"
                yield Check(f"weights in step {number} of pass {where}", float(not step.moved), 0, why, because)


def _known_mistake(drives: Mapping[str, Drive]) -> tuple[str, str]:
    """Returns the cause, and how the updates are made: by the first mistake that makes all that are wrong, in every
    pass. Where none does, what the optimizer remembers may not have been 0 at first, or have the digits of 16-bit
    numbers. Empty if nothing is known."""
    wrong = [drive for drive in drives.values() if drive.known_mistakes]
    for name, (cause, made) in KNOWN_MISTAKES.items():
        if wrong and all(drive.known_mistakes.get(name, 2.0) <= 1 for drive in wrong):
            return cause, f"made {made}"
    for drive in wrong:
        if drive.early:
            because = "held other numbers than 0 after skipped steps, before the first update"
            return "moments", f"not the optimizer's: {listed(drive.early)} {because}"
    for where, drive in drives.items():
        later = len(drive.updates) > 1 or where == LAST  # a momentum begins as a gradient, with no more digits than it
        digits = {kind: share for kind, share in drive.digits.items() if later or kind != "momentum_buffer"}
        short = [kind for kind, share in digits.items() if share > 0.5 and drive.known_mistakes]
        if short:
            return (
                "moments",
                f"not the optimizer's: what is remembered of it ({listed(short)}) has the digits of 16-bit numbers",
            )
    return "", ""
