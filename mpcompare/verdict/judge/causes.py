"""From errors of gradients to their cause: the tensors that are off, and how.

Each explanation is a function that names a cause, or none. They are tried in the order of EXPLANATIONS, from what
leaves no doubt to what only the place of the errors tells.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from mpcompare.numerals import short
from mpcompare.precision import PRECISIONS
from mpcompare.verdict.judge.accumulation import wrong_sum
from mpcompare.verdict.judge.check import Examined, listed
from mpcompare.verdict.judge.clip import clip_mistake, scales
from mpcompare.verdict.judge.drive import Drive, Gradients
from mpcompare.verdict.judge.errors import GradientError, Layer

LOST = 0.001  # the share of zeros that are no chance


@dataclass(frozen=True)
class TensorError:
    """The error of one tensor's gradient, None if it is missing, and its limit."""

    of: GradientError | None
    limit: float
    # the limit of the part of the error along the gradient, relative to the gradient; None where it is not known
    signed_limit: float | None = None

    @property
    def error(self) -> float:
        return math.inf if self.of is None else self.of.error

    @property
    def failed(self) -> bool:
        return not self.error <= self.limit

    @property
    def excess(self) -> float:
        """The error over its limit."""
        return self.error / max(self.limit, 1e-300)

    @property
    def relative(self) -> float:
        """The error over the norm of the exact gradient."""
        return self.error / max(self.of.norm if self.of else 0.0, 1e-300)

    @property
    def zeros(self) -> float:
        """The share of elements that became 0, all of a gradient that is missing."""
        return 1.0 if self.of is None else self.of.zeros


@dataclass(frozen=True)
class Pass:
    """A step whose gradients are judged, and the step of the reference."""

    own: Gradients
    reference: Gradients
    drive: Drive | None = None  # the driven backend that took the step; None for the step after training


Explanation = tuple[str, str]  # the cause, and a sentence that goes on after "in the first step"


@dataclass(frozen=True)
class Symptoms:
    """Everything that tells a cause."""

    run: Examined  # the run that has these gradients
    errors: Mapping[str, TensorError]  # by tensor; at least one failed
    step: Pass  # the step of the run, and the step of its reference
    loss_is_right: bool  # whether the loss of the pass is within its limit

    @property
    def drive(self) -> Drive:
        """The driven backend of the pass, or else of the first pass, which had a similar loss scale."""
        return self.step.drive or self.run.findings.first

    @cached_property
    def failed(self) -> list[str]:
        return [name for name, e in self.errors.items() if e.failed]

    @cached_property
    def some(self) -> str:
        """The names of the tensors that failed, two at most."""
        return listed(self.failed)

    @cached_property
    def off(self) -> str:
        """The tensor that is the furthest beyond its limit, and how far off it is."""
        worst = max(self.failed, key=lambda name: self.errors[name].excess)
        return f"{worst} is off by {self.errors[worst].relative:.1e} of its norm"

    def vanishes(self, name: str) -> bool:
        """Returns whether a gradient is 0 but for rounding errors, so that it has no direction."""
        e = self.errors[name]
        return e.of is not None and e.of.norm <= e.limit

    @cached_property
    def near(self) -> float:
        """The largest distance from 1 of a factor by which nobody scales on purpose."""
        return math.sqrt(self.run.unit_roundoff)

    @cached_property
    def layers(self) -> Mapping[str, Layer]:
        return self.run.findings.layers

    @cached_property
    def of_last(self) -> list[str]:
        """The tensors of the last layer."""
        last = max((self.layers[name].place for name in self.errors), default=-1)
        return [name for name in self.errors if self.layers[name].place == last]

    @cached_property
    def roles(self) -> set[str]:
        """The roles of the layers that failed."""
        return {self.layers[name].role for name in self.failed}


def explain(symptoms: Symptoms) -> Explanation:
    """Returns the cause and its sentence; both empty where nothing failed."""
    if not symptoms.failed:
        return "", ""
    return next(explanation for explain_by in EXPLANATIONS if (explanation := explain_by(symptoms)))


def _missing(s: Symptoms) -> Explanation | None:
    for name in s.failed:
        e = s.errors[name]
        if e.zeros == 1:
            return "gradient missing", f"{name} has no gradient"
        if not math.isfinite(e.error):
            return "overflow", f"the gradient of {name} holds inf or NaN"
    return None


def _accumulated(s: Symptoms) -> Explanation | None:
    batches, of_tensors = s.step.own.micro_batches, s.step.own.of_tensors
    if batches is None:
        return None
    if because := wrong_sum(batches, math.hypot(*(e.limit for e in s.errors.values()))):
        return "accumulation", because
    each = [wrong_sum(of_tensors[name], s.errors[name].limit) if name in of_tensors else "" for name in s.failed]
    return ("accumulation", f"of {s.failed[0]} {each[0]}") if all(each) else None


def _scaled(s: Symptoms) -> Explanation | None:
    """Every gradient is off by one factor; or, where the loss is right, every one that failed."""
    factor = _factor(s.errors)
    if not factor:
        some = {name: s.errors[name] for name in s.failed if not s.vanishes(name)}
        if s.loss_is_right and (factor := _factor(some)):
            return "gradient scaled", f"the gradients of {s.some} are {short(factor)} times what they should be"
        return None
    if mistake := clip_mistake(factor, s.run, s.drive, s.step.own):
        return "clip", f"every gradient is {short(factor)} times what it should be{mistake}"
    u, loss, exact = s.run.unit_roundoff, s.step.own.loss, s.step.own.exact_loss
    known = _known(factor, s)
    near = abs(factor - 1) < s.near
    if not known and near and 2 * len(s.failed) > len(s.errors):
        because = f"every gradient is {factor:.6g} times what it should be"
        return "loss", f"{because}: another loss (smoothed labels?), or a mean over another number"
    if known or (s.loss_is_right and not near):  # gradients of another loss may be nearly proportional
        return "gradient scaled", f"every gradient is {short(factor)} times what it should be{known}"
    if abs(factor - 1) > u and math.isclose(loss, factor * exact, rel_tol=u):
        return "loss", f"the loss and every gradient are {short(factor)} times what they should be: a wrong mean"
    return None


def _transposed(s: Symptoms) -> Explanation | None:
    for name in s.failed:
        e = s.errors[name].of
        if e and e.transposed is not None and e.transposed <= s.errors[name].limit:
            return "gradient transposed", f"the gradient of {name} is transposed"
    return None


def _underflow(s: Symptoms) -> Explanation | None:
    """Zeros that should not be there, unless another function makes them. Numbers that underflow are small, so the last
    layer, which has no zeros, is then only a little wrong."""
    most = max(s.failed, key=lambda name: s.errors[name].zeros)
    share, small = s.errors[most].zeros, too_small(s.run, s.step)
    lost_in_last = max(s.errors[name].zeros for name in s.of_last)
    follows = not small and lost_in_last <= LOST and max(s.errors[name].relative for name in s.of_last) > s.near
    if underflows(s.run) and share > LOST and not follows:
        return "underflow", f"{100 * share:.2g} % of the gradient of {most} is 0 and should not be{small}"
    return ("underflow", f"{s.off}{small}") if small else None


def _one_role(s: Symptoms) -> Explanation | None:
    """Only layers of one role are wrong, or gradients that are 0 before a norm, with or without norms' gradients."""
    if s.roles in ({"normalization"}, {"embedding"}):
        (only,) = s.roles
        return only, f"only gradients of {only} layers are wrong ({s.some}), {s.off}"
    normed = {layer.after for layer in s.layers.values() if layer.role == "normalization"}
    before = [name for name in s.failed if s.vanishes(name) and s.layers[name].layer in normed]
    if before and all(name in before or s.layers[name].role == "normalization" for name in s.failed):
        because = f"the gradients of {listed(before)} are 0 before a norm, and it passes down something else"
        return "normalization", because
    return None


def _bias_sums(s: Symptoms) -> Explanation | None:
    if all(s.layers[name].part.startswith("bias") for name in s.failed):
        return "bias sum", f"only bias gradients are wrong ({s.some}), {s.off}: sums over the batch"
    return None


def _below_the_last_layer(s: Symptoms) -> Explanation | None:
    """One layer alone is wrong in itself where the last one is right; several are passed something else."""
    if any(s.errors[name].failed for name in s.of_last):
        return None
    wrong = {s.layers[name].layer for name in s.failed}
    right_beside = any(s.layers[name].layer in wrong and not e.failed for name, e in s.errors.items())
    if len(wrong) == 1 and (right_beside or "first" in s.run.findings.replays):
        return s.layers[s.failed[0]].role or "products", f"only gradients of {s.some} are wrong, {s.off}"
    return "input gradient", f"right in the last layer and wrong below it ({s.some}), {s.off}: what is passed down"


def _products(s: Symptoms) -> Explanation | None:
    biases = [name for name in s.of_last if s.layers[name].part.startswith("bias")]
    if s.roles <= {""} and biases and not any(s.errors[name].failed for name in biases):
        return "products", f"wrong where matrices are multiplied ({s.some}), {s.off}: sums in 16 bits?"
    return None


def _from_the_last_layer_on(s: Symptoms) -> Explanation:
    furthest = max(s.errors[name].relative for name in s.of_last)
    if furthest > s.near:
        return "forward pass", f"wrong from the last layer on ({s.some}), by up to {furthest:.1e}: another function"
    return "loss", f"wrong from the loss's gradient on ({s.some}), {s.off}: softmax, or the forward pass"


EXPLANATIONS: tuple[Callable[[Symptoms], Explanation | None], ...] = (
    _missing, _accumulated, _scaled, _transposed, _underflow, _one_role, _bias_sums, _below_the_last_layer, _products,
    _from_the_last_layer_on,
)  # fmt: skip


def too_small(run: Examined, step: Pass) -> str:
    """Returns a clause that goes on after another, if most of the activations' gradients are too small for all digits
    of fp16, and far fewer of the reference's are, whose loss scale is larger."""
    own, beside = step.own.subnormal, step.reference.subnormal
    if not underflows(run) or step.drive is None or own <= max(0.5, 2 * beside):
        return ""
    scale = next(each.loss_scale for each in step.drive.steps if each.finite)
    because = f": at loss scale {scale:g}, {100 * own:.3g} % of the activations' gradients are subnormal in fp16, of "
    return f"{because}the reference's {100 * beside:.2g} %"


def underflows(run: Examined) -> bool:
    """Returns whether the precision underflows where fp32 does not."""
    storage = PRECISIONS[run.findings.precision].storage
    return storage.smallest_normal > PRECISIONS["fp32"].storage.smallest_normal


def _factor(errors: Mapping[str, TensorError]) -> float | None:
    """Returns the one factor by which every gradient is off, if that is all."""
    known = [(e.of, e) for e in errors.values() if e.of and e.of.norm]
    if not known or min(of.slope for of, _ in known) <= 0 or not any(e.failed for _, e in known):
        return None
    best, exactly = min(known, key=lambda pair: pair[1].limit / pair[0].norm)  # the factor of this tensor is known best
    unknown = exactly.limit / best.norm
    alone = all(of.residual <= max(1, of.slope) * e.limit for of, e in known)
    spread = all(abs(of.slope / best.slope - 1) <= 2 * (e.limit / of.norm + unknown) + 1e-6 for of, e in known)
    return best.slope if alone and spread else None


def _known(factor: float, s: Symptoms) -> str:
    """Returns a clause that names the number by which gradients were multiplied by mistake, if it is known."""
    known = {f"the loss scale {scale:g}": scale for scale in scales(s.drive)}
    known["the batch size"] = s.run.findings.recipe.batch_size
    for name, value in known.items():
        if math.isclose(factor, value, rel_tol=0.01):
            return f": {name}"
        if math.isclose(factor, 1 / value, rel_tol=0.01):
            return f": 1 / {name}"
    return ""
