"""Is each operation of the first step right, with the operands that it had?

- *Why.* No error travels in a forced replay. So a layer that is off is wrong itself, or the work just before it is. The
  cause names it.
- *Value.* What arrives at each layer in the first step, its output, and the gradient that arrives there. Also the
  buffers, and the gradients of parameters that follow from these operands. All are compared with the
  [forced replay](verdict.md).
- *Choices* that the network makes between its layers, as a router does, are the run's choices. They may be made by
  numbers of 16 bits only where amp's are, too. A number has 16 bits if it is further off than halfway between a
  rounding to 16 bits and a rounding to fp32, whatever its dtype is.
- *Kinks* of functions, as of a clamp between layers, or of the activation that a norm of timm's calls: a number that
  roundings may move across a kink is on the side on which it was in the run.
- *Limit.* 2 times the roundings there, or 2 times amp's own error there, and fp32 sums. Gradients of parameters have
  the limits, signs and zeros of `gradients`.
"""

from dataclasses import replace

from mpcompare.verdict.judge.buffers import cause_of
from mpcompare.verdict.judge.causes import Pass
from mpcompare.verdict.judge.check import Case, Check, Checks, Examined, worst_of
from mpcompare.verdict.judge.dtypes import SHORT
from mpcompare.verdict.judge.errors import GradientError, PlaceError
from mpcompare.verdict.judge.gradients import gradient_checks
from mpcompare.verdict.judge.layer_causes import explained
from mpcompare.verdict.judge.limits import K, error_like, place_limit, roundings, stored_coarsely
from mpcompare.verdict.judge.replayed import PLACES, WHERE, Layers, as_place, beyond, percent_off, said_of


def checks(case: Case) -> Checks:
    """Yields checks of the first step."""
    yield from of_replay(case, "first")


def of_replay(case: Case, name: str) -> Checks:
    """Yields checks of the step whose replay has this name."""
    run, reference = (each.findings.replays.get(name) for each in (case.run, case.reference))
    if not case.is_reference and run is not None:
        yield from of_step(case, run, reference, WHERE[name])


def doubt(run: Examined) -> str:
    """Returns a sentence on the place at which the reference itself is the furthest beyond its roundings; empty where
    there is no such place."""
    for name, layers in run.findings.replays.items():
        shown = {n: e for n, e in layers.gradients.items() if e and n in layers.rounding}
        places = layers.places | {f"parameter {n}": as_place(e, layers, n) for n, e in shown.items()}
        excess = {at: each.error / max(roundings(run, each, in_a_row=True), 1e-300) for at, each in places.items()}
        worst = worst_of(excess)
        if worst and not excess[worst] <= K:
            kind, _, layer = worst.partition(" ")
            said = f"{said_of(worst, WHERE[name])} is itself {percent_off(places[worst])} off"
            said += ", beyond what roundings make"
            # The place whose operators made the tensor: a layer, or the work before one.
            made_at = {"input": f"before {layer}", "output": layer, "parameter": layer.rpartition(".")[0]}
            reason = beyond(layers.digits.get(made_at.get(kind, "")), run.precision)
            if kind == "parameter" and layer in layers.of_kernels:
                reason = "torch's own kernel makes it so of these operands"
            return f"{said}: {reason}" if reason else said
    return ""


def of_step(case: Case, run: Layers, reference: Layers | None, where: str, first_is_right: bool = True) -> Checks:
    """Yields the checks of one step.

    Args:
        reference: the reference's step; None where roundings alone are the measure.
        where: the step, in words.
        first_is_right: whether gradients that are wrong here are known to be right in the first step.
    """
    if run.detached:
        because = f"no gradient passes back from the output of {run.detached[0]} {where}"
        missing, layer = len(run.detached), run.detached[0]
        yield Check(f"gradients pass {where}", missing, 0, "gradient missing", because, layer=layer)
    yield from _coarse_choices(run, reference, where)
    others = reference.places if reference else {}
    limits = {at: place_limit(case.run, place, others.get(at)) for at, place in run.places.items()}
    for buffer, place in run.places.items():
        if buffer.startswith("buffer "):  # a promise may allow fewer digits for a buffer
            limits[buffer] += stored_coarsely(case.run) * place.norm
    failed = [at for at, place in run.places.items() if not place.error <= limits[at]]
    excess = {at: _excess(run.places[at], others.get(at)) for at in failed}
    cause, because, layer = explained(case, run, excess, where)
    for kind in PLACES:
        share = {at: e.error / max(limits[at], 1e-300) for at, e in run.places.items() if at.startswith(f"{kind} ")}
        if share:
            wrong = {at: part for at, part in share.items() if at in failed}
            worst = worst_of(wrong or share)
            told = (cause, because, layer) if wrong else ("", "", "")
            yield Check(said_of(worst, where), run.places[worst].error, limits[worst], *told[:2], layer=told[2])
    step, said = as_pass(case, run, reference), f"{where}, from the operands of its layer"
    if where == WHERE["first"]:
        step, said = _as_driven(case, step), where
    yield from gradient_checks(case, said, step, run.rounding, cause, first_is_right)
    yield from _whole_numbers(case, run, reference, where)  # a layer that is wrong tells more than its count does


def _as_driven(case: Case, step: Pass) -> Pass:
    """Returns the first step with what only the drive of the pass ``first`` tells: the micro-batches' weights, the loss
    scales, and how small gradients are at these scales."""
    own, reference, drive = step.own, step.reference, case.run.findings.first
    if found := drive.finite:
        own = replace(own, micro_batches=found.micro_batches, of_tensors=found.of_tensors, subnormal=found.subnormal)
    if beside := case.reference.findings.first.finite:
        reference = replace(reference, subnormal=beside.subnormal)
    return Pass(own, reference, drive)


def as_pass(case: Case, run: Layers, reference: Layers | None) -> Pass:
    """Returns the run's step and its reference's step, whose errors are converted to the run's operands.

    The gradient of a norm may be right, or equal the result of torch's own kernel. Each gradient is compared with the
    nearer of the two: a kernel that is far off excuses only its own result.
    """
    own = run.gradients | run.of_kernels
    others = reference.gradients | reference.of_kernels if reference else {}
    scaled: dict[str, GradientError | None] = {}
    for name, e in own.items():
        other = others.get(name)
        if e is None:  # a missing gradient, which is wrong where the reference has one, replayed or not
            scaled[name] = other or case.reference.findings.first.gradients.get(name)
            continue
        error, zeros, slope = 0.0, 0.0, 1.0
        if other and reference:
            error = error_like(as_place(other, reference, name), as_place(e, run, name))
            zeros, slope = max(other.zeros, reference.rounding[name].zeros), other.slope
        if _begins_as_high(case):
            zeros = max(zeros, run.rounding[name].zeros)
        zeros += run.rounding[name].cancelled
        # The roundings of few elements are known from samples, so the largest element is not needed.
        scaled[name] = replace(e, error=error, largest=0.0, zeros=zeros, slope=slope)
    return Pass(replace(run, gradients=own), replace(run, loss=run.exact_loss, gradients=scaled))


def _begins_as_high(case: Case) -> bool:
    """Returns whether a run's loss scale begins no lower than its reference's scale: a scale that is too small excuses
    no zeros. The check of the loss scale says whether the scale falls as it should."""
    begins = [each.findings.first.steps[:1] for each in (case.run, case.reference)]
    return all(own.loss_scale >= other.loss_scale for own, other in zip(*begins, strict=False))


def _excess(place: PlaceError, reference: PlaceError | None) -> float:
    own = error_like(reference, place) if reference else 0.0
    return min(place.far, place.error / own) if own else place.far


def _whole_numbers(case: Case, run: Layers, reference: Layers | None, where: str) -> Checks:
    """Yields a check of the words, or other whole numbers, that the network is given, and one of each such buffer. A
    replay may call a layer of a checkpoint more often than the step did. The replay of the reference does so, too."""
    others = reference.other_whole_numbers if reference else [*filter(None, run.other_whole_numbers)]
    for name in (name for name in run.other_whole_numbers if name not in others):
        because = f"the network is given other whole numbers than those of the batch {where}"
        if name:
            because = f"{name} has other whole numbers {where} than in its replay"
        cause = cause_of(case, name) if name else "forward pass"
        yield Check(f"whole numbers {where}", 1, 0, cause, because, tensor=name)


def _coarse_choices(run: Layers, reference: Layers | None, where: str) -> Checks:
    """Yields the check of the numbers by which the network chooses: a replay chooses as the step did, so it does not
    see that these numbers have fewer digits than the reference's numbers."""
    others = reference.choices if reference else {}
    coarse = [at for at, kind in others.items() if run.choices.get(at) in SHORT and kind not in SHORT]
    if coarse:
        because = f"{coarse[0]} chooses by {run.choices[coarse[0]]} numbers {where}, and the reference by "
        yield Check(f"numbers to choose by {where}", len(coarse), 0, "precision", because + others[coarse[0]])
