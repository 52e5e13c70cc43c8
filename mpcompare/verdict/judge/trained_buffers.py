"""Are buffers right after training?

- *Value.* Buffers after the trained backend's next step, compared with a new backend's. Buffers at the end of training,
  compared with amp's.
- *Limit after the next step.* As for a gradient, without a rounding of the numbers themselves.
- *Limit at the end.* Whole numbers exactly. All others together as `run`, and roundings of what they are made of. No
  buffer holds inf or NaN if all weights are finite. This holds for amp, too.
"""

import math
from collections.abc import Sequence

import numpy as np

from mpcompare.verdict.judge import promises
from mpcompare.verdict.judge.buffers import Buffers, cause_of, of_step
from mpcompare.verdict.judge.check import Case, Check, Checks
from mpcompare.verdict.judge.limits import FP32, K, sum_error
from mpcompare.verdict.judge.trajectories import common_steps, jump, noise_factor


def checks(case: Case) -> Checks:
    """Yields checks of the buffers that training moves. In fp32 the buffers at its end are not compared together, as
    weights are not (run.py). The reference, too, must have finite numbers."""
    yield from _numbers(case)
    if case.is_reference:
        return
    # Both round alike in the next step: limits are the gradients' limits without a rounding of the numbers themselves.
    errors, others = case.run.findings.last_buffers, case.reference.findings.last_buffers
    beyond = {name for name, e in errors.items() if e and not math.isfinite(e.norm)}
    known = {name: e for name, e in others.items() if errors and name not in beyond}
    yield from of_step(case, "after training", errors, known, {}, ", and right after the first step")
    if "buffers" in case.run.findings.stopped:
        return
    own, noise = case.run.findings.buffers, case.reference.findings.noise
    if not noise or case.run.start != case.reference.start or promises.kept(case.run):
        return
    correct = [case.reference.findings.buffers, *(run.buffers for run in noise)]
    yield from _whole_numbers(case, own, correct)
    if common_steps(case.reference, case.run) == len(case.reference.steps) and not jump(case.reference):
        yield from _others(case, own, correct)


def _numbers(case: Case) -> Checks:
    """A running mean that once took up inf or NaN holds it for ever. Weights that are finite can be trained on from
    there, but the network cannot be evaluated."""
    findings = case.run.findings
    if not all(math.isfinite(v) for values in findings.moved.values() for v in values):
        return
    for name, b in findings.buffers.items():
        wrong = not all(math.isfinite(v) for v in b.sketch)
        because = f"{name} holds inf or NaN after training, and no weight does"
        yield Check("numbers in buffer", float(wrong), 0, cause_of(case, name), because, tensor=name)


def _whole_numbers(case: Case, own: Buffers, correct: Sequence[Buffers]) -> Checks:
    """Whole numbers that all correct runs agree in, such as a count of steps, must be equal. A loop may call the
    network once more in a step, and a count of calls counts this call, too."""

    def value(buffers: Buffers, name: str) -> str:
        return buffers[name].whole if name in buffers else "what it was at first"

    aside = {name for replay in case.run.findings.replays.values() for name in replay.aside}
    for name in (each for each in correct[0] | own if each not in aside):
        expected, found = value(correct[0], name), value(own, name)
        if all(value(other, name) == expected for other in correct) and expected and found:
            because = f"{name} is {found} after training, and {expected} in {case.reference.name}"
            yield Check("whole number", float(found != expected), 0, cause_of(case, name), because, tensor=name)


def _others(case: Case, own: Buffers, correct: Sequence[Buffers]) -> Checks:
    """Yields one check for all, each in units of its norm. The limit is the distance that one more correct run may
    have, one rounding of each buffer in each step, and roundings of the numbers that it is made of. A network may keep
    the mean of its inputs, which has no noise, and ``master_weights`` gives it inputs in 16 bits: see ``_size``.

    Differences grow along one direction, and single buffers may be close by luck.
    """
    names = [name for name, b in correct[0].items() if not b.whole and all(name in other for other in correct)]
    norms = {name: math.hypot(*correct[0][name].sketch) for name in names}
    names = [name for name in names if 0 < norms[name] < math.inf]
    if not names:
        return

    def rows(buffers: Buffers) -> np.ndarray:
        zero = [0.0] * len(correct[0][names[0]].sketch)
        return np.array([np.divide(buffers[n].sketch if n in buffers else zero, norms[n]) for n in names])

    found = [rows(buffers) for buffers in correct]
    noises = np.sqrt(np.var(found, axis=0, ddof=1).sum(axis=1))
    noise, u = float(np.linalg.norm(noises)), case.run.unit_roundoff
    sizes = [_size(case, n, norms[n]) if own_noise < u else 1.0 for n, own_noise in zip(names, noises, strict=True)]
    each = np.linalg.norm(rows(own) - found[0], axis=1)
    worst = names[int(np.argmax(np.where(np.isnan(each), math.inf, each)))]
    rounded = len(case.reference.steps) * FP32 + sum_error(case.run)
    distance = float(np.linalg.norm(each))
    because = f"buffers are {distance:.1e} of their norms away from the buffers of {case.reference.name} after "
    because += f"training, which vary by {noise:.1e}; the furthest is {worst}"
    limit = noise_factor(case.reference) * noise + rounded * math.sqrt(len(names)) + u * math.hypot(*sizes)
    yield Check("buffers after the run", distance, limit, cause_of(case, worst), because)


def _size(case: Case, name: str, norm: float) -> float:
    """Returns how large the terms of a buffer are over its norm, at least 1: terms may cancel, and each step adds some.
    Their roundings have a standard deviation of u / sqrt(3) times their size, and K u times it is 3.5 of these."""
    replays = (replay for each in (case.run, case.reference) for replay in each.findings.replays.values())
    places = (place for replay in replays if (place := replay.places.get(f"buffer {name}")))
    most = max((max(place.terms, place.rounding / case.run.unit_roundoff) for place in places), default=0.0)
    return max(1.0, K * len(case.reference.steps) * most / norm)
