"""Is each operation of the first step right, with the operands that it had?

- *Why.* No error travels in a forced replay. So a layer that is off is wrong itself, or the work just before it is. The
  cause names it.
- *Value.* What arrives at each layer in the first step, its output, and the gradient that arrives there. Also the
  buffers, and the gradients of parameters that follow from these operands. All are compared with the
  [forced replay](verdict.md).
- *Choices* that the network makes between its layers, as a router does, are the run's choices. They may be made by
  numbers of 16 bits only where amp's are, too. A number has 16 bits if it is further off than halfway between a
  rounding to 16 bits and a rounding to fp32, whatever its dtype is.
- *Limit.* 2 times the roundings there, or 2 times amp's own error there, and fp32 sums. Gradients of parameters have
  the limits, signs and zeros of `gradients`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpcompare.precision import FORMATS
from mpcompare.verdict.judge import digits
from mpcompare.verdict.judge.buffers import cause_of
from mpcompare.verdict.judge.causes import LOST, Pass, underflows
from mpcompare.verdict.judge.check import Case, Check, Checks, Examined
from mpcompare.verdict.judge.digits import Digits
from mpcompare.verdict.judge.drive import Gradients
from mpcompare.verdict.judge.dtypes import SHORT
from mpcompare.verdict.judge.errors import Errors, GradientError, PlaceError, RoundingErrors
from mpcompare.verdict.judge.gradients import gradient_checks
from mpcompare.verdict.judge.limits import K, error_like, place_limit, roundings, stored_coarsely

OUTPUT = "(output)"  # the output of the network, above which there is the loss
WHERE = {"first": "in the first step", "sharp": "at sharp weights", "last": "after training"}
PLACES = {
    "input": "what arrives at", "output": "the output of", "gradient": "the gradient that arrives at",
    "buffer": "the buffer", "parameter": "the gradient of",
}  # fmt: skip
APART = K**2  # the ratio of two errors over their measures: each measure may be K times as wide as it need be


@dataclass(frozen=True)
class Layers(Gradients):
    """A step compared with its forced replay, which goes on at each layer from what the backend had there. Gradients of
    the parameters are compared with those that follow from the recorded operands."""

    # by ``input LAYER``, ``output LAYER``, ``gradient LAYER`` and ``buffer BUFFER`` the error there; of several calls
    # the error of the call that is furthest off
    places: dict[str, PlaceError] = field(default_factory=dict)
    rounding: RoundingErrors = field(default_factory=dict)  # by gradient the error of one rounding of each result
    detached: list[str] = field(default_factory=list)  # the layers that should pass a gradient back, and do not
    # by layer, or ``before LAYER`` for the work before it, what 16 bits cost there, in the order of forward; empty in
    # other precisions
    digits: dict[str, Digits] = field(default_factory=dict)
    # for norms whose gradients are further off than roundings make, the errors compared with the gradients that torch's
    # own kernels make of the same operands, where these gradients are nearer
    of_kernels: Errors = field(default_factory=dict)
    factor: float = 1.0  # the factor of the gradient at the output of the network, without the loss scale
    # by place, as in ``places``, the format in which the place is computed, if it is the other format of 16 bits
    formats: dict[str, str] = field(default_factory=dict)
    # by place in the network's code, the format of the numbers by which the network chooses between its layers
    choices: dict[str, str] = field(default_factory=dict)
    # whether the network was called once for each micro-batch, with its rows as they are; other rows would draw other
    # masks
    as_given: bool = True
    # whether the loss was replayed, too; it is not where nobody can tell which rows the network was called with, and
    # then the replay does not check the loss
    loss_is_replayed: bool = True


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
        places = layers.places | {f"parameter {n}": _as_place(e, layers, n) for n, e in shown.items()}
        excess = {at: each.error / max(roundings(run, each, in_a_row=True), 1e-300) for at, each in places.items()}
        worst = max(excess, key=excess.__getitem__, default="")
        if worst and excess[worst] > K:
            kind, _, layer = worst.partition(" ")
            said = f"{_said(worst, WHERE[name])} is itself {_percent(places[worst])} off, beyond what roundings make"
            # The place whose operators made the tensor: a layer, or the work before one.
            made_at = {"input": f"before {layer}", "output": layer, "parameter": layer.rpartition(".")[0]}
            reason = digits.beyond(layers.digits.get(made_at.get(kind, "")), run.precision)
            if kind == "parameter" and layer in layers.of_kernels:
                reason = "torch's own kernel makes it so of these operands"
            return f"{said}: {reason}" if reason else said
    return ""


def _as_place(e: GradientError, layers: Layers, tensor: str) -> PlaceError:
    rounding = layers.rounding[tensor]
    return PlaceError.of(e.error, e.norm, rounding)


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
    cause, because, layer = _explained(case, run, excess, where)
    for kind in PLACES:
        share = {at: e.error / max(limits[at], 1e-300) for at, e in run.places.items() if at.startswith(f"{kind} ")}
        if share:
            worst = max(share, key=share.__getitem__)
            value, fails = run.places[worst].error, any(at in share for at in failed)
            told = (cause, because, layer) if fails else ("", "", "")
            yield Check(_said(worst, where), value, limits[worst], *told[:2], layer=told[2])
    step, said = as_pass(case, run, reference), f"{where}, from the operands of its layer"
    if where == WHERE["first"]:
        step, said = _as_driven(case, step), where
    yield from gradient_checks(case, said, step, run.rounding, cause, first_is_right)


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
        if e is None:  # a missing gradient, which is wrong where the reference has one
            scaled[name] = other
            continue
        error, zeros, slope = 0.0, 0.0, 1.0
        if other and reference:
            error = error_like(_as_place(other, reference, name), _as_place(e, run, name))
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


def _coarse_choices(run: Layers, reference: Layers | None, where: str) -> Checks:
    """Yields the check of the numbers by which the network chooses: a replay chooses as the step did, so it does not
    see that these numbers have fewer digits than the reference's numbers."""
    others = reference.choices if reference else {}
    coarse = [at for at, kind in others.items() if run.choices.get(at) in SHORT and kind not in SHORT]
    if coarse:
        because = f"{coarse[0]} chooses by {run.choices[coarse[0]]} numbers {where}, and the reference by "
        yield Check(f"numbers to choose by {where}", len(coarse), 0, "precision", because + others[coarse[0]])


def _explained(case: Case, run: Layers, excess: Mapping[str, float], where: str) -> tuple[str, str, str]:
    """Returns the cause, its sentence, and the layer or buffer at which it shows, from the first place that is wrong.
    All three are empty where no place is wrong.

    A place of backward that is far more wrong than all of forward is named first: a forward that is written in more
    operations than the layer's own may round a little more.

    Args:
        excess: for each wrong place its error, divided by the larger of one rounding and the reference's own error. The
            order is the step's: forward, backward, and then buffers. Limits are wider where samples say less.
    """
    if not excess:
        return "", "", ""
    failed = list(excess)
    forward = [at for at in failed if at.startswith(("input ", "output "))]
    backward = [at for at in failed if at.startswith("gradient ")]
    of_forward, of_backward = (max((excess[at] for at in some), default=0.0) for some in (forward, backward))
    if of_backward > APART * of_forward:
        forward = []
    at = (forward or backward or failed)[0]
    kind, _, layer = at.partition(" ")
    place = run.places[at]
    because = f"{_said(at, where)} is {_percent(place)} off, beyond what its roundings make"
    above = _above(case, run, failed, layer) if kind == "gradient" and layer != OUTPUT else []
    if above:
        because += f": what {' or '.join(above)} passes down"
    shows = "" if layer == OUTPUT else layer
    format = run.formats.get(at, "")
    if format and place.error <= math.sqrt(FORMATS[format].unit_roundoff) * place.norm:
        return "precision", f"{because} in {case.run.precision}: it is computed in {format}", shows
    if kind == "gradient" and place.error == place.norm:  # the recorded gradient is 0
        return "gradient missing", because, shows
    if kind == "gradient" and (layer == OUTPUT or not (above or f"gradient {OUTPUT}" in run.places)):
        lost = _lost(case, run, place)
        return ("underflow", f"{because}: {lost}", "") if lost else ("loss", because, "")
    if kind == "buffer":
        return cause_of(case, layer), because, shows
    if forward:
        found = _of_output(case, run, layer, place) if kind == "output" else ""
        return found or "forward pass", because, shows
    if any(_role(case, each) == "attention" and each.rpartition(".")[0] == layer.rpartition(".")[0] for each in above):
        return "attention", because, shows
    below = [each.layer for each in case.run.findings.layers.values() if each.after == layer]
    return next(filter(None, (_role(case, each) for each in below)), "") or "input gradient", because, shows


def _of_output(case: Case, run: Layers, layer: str, place: PlaceError) -> str:
    """Returns the cause of a layer's wrong output: its role, or a product whose sum has too few digits. Such a sum
    keeps half of the digits at least, and the weights' gradients, which are such sums, lose digits, too. Else none."""
    own = [name for name, each in case.run.findings.layers.items() if each.layer == layer and name in run.rounding]
    sums = [_as_place(e, run, name) for name in own if (e := run.gradients.get(name))]
    short = any(each.error > roundings(case.run, each) for each in sums)
    rounded = place.error <= math.sqrt(case.run.unit_roundoff) * place.norm
    return _role(case, layer) or ("products" if short and rounded else "")


def _above(case: Case, run: Layers, failed: list[str], layer: str) -> list[str]:
    """Returns the layers that are given a layer's output as it is, or else the layer that is called next. Only layers
    with a right gradient at their own output count."""
    given = [each.layer for each in case.run.findings.layers.values() if each.after == layer]
    right = [each for each in dict.fromkeys(given) if f"gradient {each}" not in failed]
    if right:
        return right
    order = [at.partition(" ")[2] for at in run.places if at.startswith("output ")]
    after = order[order.index(layer) + 1 :] if layer in order else []
    return [each for each in after if f"gradient {each}" not in failed and each != OUTPUT][:1]


def _lost(case: Case, run: Layers, place: PlaceError) -> str:
    """Returns a clause on the gradient that has the most zeros, if the loss's gradient is no further off than small
    numbers of fp16 are; empty otherwise."""
    zeros = {name: e.zeros for name, e in run.gradients.items() if e}
    most = max(zeros, key=zeros.__getitem__, default="")
    small = place.error <= math.sqrt(case.run.unit_roundoff) * place.norm
    if not (most and small and underflows(case.run) and zeros[most] > LOST):
        return ""
    return f"{100 * zeros[most]:.2g} % of the gradient of {most} is 0 and should not be"


def _role(case: Case, layer: str) -> str:
    return next((each.role for each in case.run.findings.layers.values() if each.layer == layer), "")


def _said(at: str, where: str) -> str:
    kind, _, layer = at.partition(" ")
    if layer == OUTPUT:
        layer = "the network" if kind == "output" else "the output"
    return f"{PLACES[kind]} {layer} {where}"


def _percent(place: PlaceError) -> str:
    return digits.percent(place.error / place.norm) if place.norm else "wholly"
