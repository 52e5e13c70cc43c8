"""Is each declared difference seen?

- *Value.* Whether a declared difference is seen.
- *Limit.* It must be seen. A promise that nothing can show is listed as not checked.
"""

import math
from dataclasses import dataclass

from mpcompare.verdict.judge.check import Case, Check, Checks, Examined, listed

SIGMAS = 4  # standard deviations
ROUNDED = {"nearest": "", "stochastic": ", rounded at random", "compensated": ", with a compensation"}


@dataclass(frozen=True)
class Promise:
    """A difference from ``amp`` that a backend declares."""

    words: str  # the difference in a few words
    kept: bool | None  # whether it is seen; None where nothing that was examined could show it
    because: str = ""  # the reason where it is not kept
    changes_training: bool = True  # whether it changes training even if all gradients are finite


def checks(case: Case) -> Checks:
    """Yields a check for each promise that can be seen. Whether more differs than is promised, the other kinds say."""
    for promise in promises_of(case.run):
        if promise.kept is not None:
            because = f"it declares {promise.words}, and {promise.because}"
            yield Check(f"declared: {promise.words}", float(not promise.kept), 0, "promise", because)


def kept(run: Examined) -> list[str]:
    """Returns the words of the promises that are seen to be kept."""
    return [promise.words for promise in promises_of(run) if promise.kept]


def change_training(run: Examined) -> bool:
    """Returns whether promises that are seen to be kept make training differ from the training of ``amp``."""
    return any(promise.kept and promise.changes_training for promise in promises_of(run))


def unseen(run: Examined) -> list[str]:
    """Returns the words of the promises that nothing could show."""
    return [promise.words for promise in promises_of(run) if promise.kept is None]


def promises_of(run: Examined) -> list[Promise]:
    """Returns everything that was promised."""
    promises = run.findings.promises
    declared = {
        _weights: promises.weights != "fp32",
        _moments: promises.moments != "fp32",
        _clip: promises.clip_norm is not None,
        _loss_scale: bool(promises.loss_scale),
        _skips: promises.skips_without_scale,
        _restores: promises.restores_buffers,
        _differs: not promises.repeats,
    }
    return [seen(run) for seen, is_declared in declared.items() if is_declared]


def _weights(run: Examined) -> Promise:
    words = f"no master weights{ROUNDED[run.findings.promises.rounding]}"
    short = [e.short for update in run.findings.first.updates for e in update.values()]
    longer = 1 - min(short, default=1.0)
    because = f"{100 * longer:.1f} % of a weight's elements have more digits than {run.findings.promises.weights}"
    if longer == 0 and run.findings.promises.rounding == "stochastic":
        return _at_random(run, words)
    return Promise(words, longer == 0 if short else None, because)


def _at_random(run: Examined, words: str) -> Promise:
    """Rounding at random takes the farther neighbour the more often, the nearer it is. So such elements can be counted.
    Their number varies by less than its root. A small number says nothing."""
    errors = [error for update in run.findings.first.updates for error in update.values()]
    far, should_far = sum(e.far for e in errors), sum(e.should_far for e in errors)
    reach = SIGMAS * math.sqrt(should_far)
    because = f"{far} weights are rounded to the farther neighbour, where it does so with about {should_far:.0f}"
    return Promise(words, abs(far - should_far) <= reach if should_far > reach else None, because)


def _moments(run: Examined) -> Promise:
    words = f"moments in {run.findings.promises.moments}"
    longer = {kind: 1 - share for kind, share in run.findings.first.digits.items() if share < 1}
    because = ", ".join(f"{100 * share:.1f} % of {kind} has more digits" for kind, share in longer.items())
    return Promise(words, not longer if run.findings.first.digits else None, because)


def _clip(run: Examined) -> Promise:
    """The checks of clipping say whether the factor is right."""
    clip_norm = run.findings.promises.clip_norm or 0.0
    clips = [clip for drive in run.findings.drives.values() for clip in drive.clips]
    larger = [clip for clip in clips if (clip.norm if clip.should_norm is None else clip.should_norm) > clip_norm]
    return Promise(f"clips to a norm of {clip_norm:g}", bool(larger) or None)


def _loss_scale(run: Examined) -> Promise:
    """The checks of the policy say whether the scale is the promised one."""
    settings = run.findings.promises.loss_scale
    words = [f"starts at {settings['init_scale']:g}"] if "init_scale" in settings else []
    words += [f"grows after {settings['growth_interval']:g} steps"] if "growth_interval" in settings else []
    other = any(step.asked_scale is not None for drive in run.findings.drives.values() for step in drive.steps)
    return Promise(f"its own loss scale ({', '.join(words)})" if words else "its own loss scale", other or None)


def _skips(run: Examined) -> Promise:
    """Steps with a loss scale show nothing: there ``amp`` skips, too."""
    drive = run.findings.infinite
    overflowed = [step for step in drive.steps if not step.finite] if drive else []
    taken = [step for step in overflowed if step.moved or not step.skipped]
    because = "it says of a step with an infinite input that it skipped, and the weights changed"
    if any(not step.skipped for step in taken):
        because = "it does not say of a step with an infinite input that it skipped"
    words = "skips steps whose gradients overflow, though its loss is not scaled"
    return Promise(words, not taken if overflowed else None, because, changes_training=False)


def _restores(run: Examined) -> Promise:
    """Asks the pass in which the loss scale is too large: its first step is skipped."""
    drive = run.findings.overflow
    errors = drive.buffers if drive and drive.steps[0].skipped else {}
    moved = [name for name, e in errors.items() if e is None or e.error]
    because = f"a step that it skips moves {listed(moved)}"
    words = "puts buffers back after a step that it skips"
    return Promise(words, not moved if errors else None, because)


def _differs(run: Examined) -> Promise:
    again = run.findings.of_checks.get("again")
    return Promise("gives other bits each time", bool(again and again.apart) or None, changes_training=False)
