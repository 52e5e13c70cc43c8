"""The findings of an examination: dataclasses that are ``numerics.json``.

The examination makes them (examine/), the judge reads them (judge/), and neither knows the other: findings of a race,
of a test, or of anyone else's loop are judged alike. Nothing here needs torch.

Every number is of a tensor, and tensors are named as ``model.named_parameters()`` names them. A dict in which a tensor
is missing says nothing of it; None in its place says that the backend showed none.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import cattrs

from mpcompare.promises import Promises

LOWEST, HIGHEST = -60, 20  # exponents that are told apart: fp16 ends at -24 and 15


@dataclass(frozen=True)
class GradientError:
    """The distance of a gradient from the exact one, with what tells the reason.

    Attributes:
        error: ``||g - exact||`` (Frobenius).
        norm: ``||exact||``.
        largest: ``max |exact|``.
        slope: the number that times ``exact`` is closest to g.
        residual: the error that is left after that.
        zeros: the share of the ``elements`` that became 0.
        elements: the number of elements that are not 0 in ``exact``.
        transposed: the error of the transposed gradient; None unless g is square and far off.
    """

    error: float
    norm: float
    largest: float
    slope: float
    residual: float
    zeros: float
    elements: int
    transposed: float | None = None

    @property
    def relative(self) -> float:
        """``||g - exact|| / ||exact||``; inf where g holds no number, or ``exact`` is 0 and g is not."""
        if not self.norm:
            return math.inf if self.error else 0.0
        relative = self.error / self.norm
        return relative if math.isfinite(relative) else math.inf


Errors = dict[str, GradientError | None]


def relative_error(error: GradientError | None) -> float:
    """``GradientError.relative``; inf where the gradient is missing."""
    return math.inf if error is None else error.relative


@dataclass(frozen=True)
class MicroBatches:
    """The weight of each micro-batch in the gradients, by least squares.

    Attributes:
        counts: a number for each micro-batch, 1 if the gradients are right.
        rest: the norm of the part of the gradients that no counts explain, within 5 %.
        smallest: singular value of the micro-batches' gradients: an error e of the gradients is one of at most
            ``e / smallest`` in the counts.
        weights: the part of the loss that each micro-batch is, times their number: 1 unless labels are counted.
    """

    counts: list[float]
    rest: float
    smallest: float
    weights: list[float]


@dataclass(frozen=True)
class Gradients:
    """Loss and gradients of one step beside exact ones.

    Attributes:
        loss: as the backend says.
        exact_loss: in float64.
        loss_noise: standard deviation of the loss if each stored activation is rounded once.
        gradients: the error of each gradient; empty where the backend shows none.
        micro_batches: None where the step has only one, or no gradients are shown.
        of_tensors: the same of each gradient by itself; empty where there are none.
        subnormal: the share of the activations' gradients, times the loss scale, below fp16's normal numbers.
        effective_precision: the precision that the gradients show; None where none are shown, and of later steps.
    """

    loss: float
    exact_loss: float
    loss_noise: float
    gradients: Errors = field(default_factory=dict)
    micro_batches: MicroBatches | None = None
    of_tensors: dict[str, MicroBatches] = field(default_factory=dict)
    subnormal: float = 0.0
    effective_precision: str | None = None


@dataclass(frozen=True)
class UpdateError:
    """The change of a tensor beside the one that fp32 arithmetic makes of the gradients that the backend shows.

    Attributes:
        excess: the largest error over its bound.
        slope: the change over the right one.
        lost: the share of elements that should have moved and did not.
        lost_in_fp32: the share of them that fp32 rounds away.
        short: the share of the new elements that have no more digits than the compute dtype.
        left: the share of elements that should have moved and did not, though the compute dtype would not round their
            moves away.
        far, should_far: of weights that are kept in bf16, the number of new elements that are beyond half a gap of it
            from the right ones, and the number of them that rounding at random leaves there on average.
    """

    excess: float
    slope: float
    lost: float
    lost_in_fp32: float
    short: float
    left: float
    far: int = 0
    should_far: float = 0.0


@dataclass(frozen=True)
class ClipFactor:
    """The effect of clipping on one gradient, which becomes ``factor`` times itself, plus a rest.

    Attributes:
        factor: by least squares.
        rest: the norm of the rest over ``norm``.
        norm: that of the gradient before clipping.
    """

    factor: float
    rest: float
    norm: float


@dataclass(frozen=True)
class Clip:
    """The norms of one step's gradients before and after clipping, and the factor of each.

    Attributes:
        norm: that of all gradients before, as the backend says.
        norm_after: that of the clipped ones.
        clip_norm, norm_type: as the task asks for.
        elements: the number of all elements.
        should_norm, should_factor: the norm before, and the factor that follows from it; None where the gradients
            before clipping cannot be seen.
        factors: by tensor; empty where ``should_norm`` is None.
    """

    norm: float
    norm_after: float
    clip_norm: float
    norm_type: float
    elements: int
    should_norm: float | None = None
    should_factor: float | None = None
    factors: dict[str, ClipFactor] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """The loss scale and the weights in one step.

    Attributes:
        finite: whether the gradients were, as far as they are shown.
        skipped: whether the backend says that it skipped.
        should_skip: whether the policy of the loss scale skips.
        moved: whether a weight changed.
        moved_early: whether one changed before the gradients of all micro-batches were there.
        finite_after_clip: whether the clipped gradients were finite.
        loss_scale: as the backend says, before the step.
        should_scale: as the policy of the loss scale says, the backend's own where it promises one.
        asked_scale: as the policy says that was asked for; None where it is the same one.
    """

    finite: bool
    skipped: bool
    should_skip: bool
    moved: bool
    loss_scale: float
    should_scale: float
    asked_scale: float | None = None
    moved_early: bool = False
    finite_after_clip: bool = False


@dataclass(frozen=True)
class NextScale:
    """The loss scale after the last step: as the backend says, and as its policy says."""

    loss_scale: float
    should_scale: float


@dataclass(frozen=True)
class KnownMistake:
    """A known mistake that wrong updates are compared with: the cause that it would be, and the largest error, over its
    bound, of updates made that way."""

    cause: str
    excess: float


@dataclass(frozen=True)
class Drive:
    """A new backend that was driven for some steps.

    Attributes:
        steps: in their order.
        updates: the updates that were taken, by tensor.
        clips: theirs, where the task clips.
        next_scale: after the last step.
        finite: the first step of the first batch whose gradients are finite; None where none is.
        buffers: after the first step, skipped or not, beside the oracle's; empty where there are none.
        known_mistakes: by how updates are made, in words that go on after "made"; empty where they are right.
        digits: by kind of the optimizer's tensors, the share of numbers that have no more digits than a 16-bit format;
            empty where the updates are right, unless the backend promises moments of such a format.
        early: the kinds of the optimizer's tensors that hold another number than 0 before the first update.
        idle: of each update, whether each parameter moved that has no gradient in it; empty where all have one in every
            update.
    """

    steps: list[Step] = field(default_factory=list)
    updates: list[dict[str, UpdateError]] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    next_scale: NextScale | None = None
    finite: Gradients | None = None
    buffers: Errors = field(default_factory=dict)
    known_mistakes: dict[str, KnownMistake] = field(default_factory=dict)
    digits: dict[str, float] = field(default_factory=dict)
    early: list[str] = field(default_factory=list)
    idle: list[dict[str, bool]] = field(default_factory=list)

    @property
    def gradients(self) -> Errors:
        """The errors in the finite step; empty where there is none, or it shows none."""
        return self.finite.gradients if self.finite else {}

    @property
    def first_scale(self) -> float:
        """The loss scale of the first step whose gradients are finite, or else of the first step; 1 without steps."""
        return next((s.loss_scale for s in self.steps if s.finite), self.steps[0].loss_scale if self.steps else 1.0)


@dataclass(frozen=True)
class Count:
    """The number of updates that an optimizer counts after a step, and the right one.

    Attributes:
        dtype: the format in which the backend keeps it.
    """

    count: float
    should_count: int
    dtype: str


@dataclass(frozen=True)
class Aged:
    """A step from a state as it is after long training.

    Attributes:
        drive: the step, at the initial weights.
        grows: whether the loss scale grows after it.
        counts: by tensor, where the optimizer counts its updates; empty where it does not.
    """

    drive: Drive
    grows: bool
    counts: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainedUpdate:
    """The trained backend's next update, replayed from its own optimizer state.

    Attributes:
        drive: the step.
        moments: by kind of the optimizer's tensors and by parameter, the largest error over its bound after the update.
        counts: by tensor, where the optimizer counts its updates.
    """

    drive: Drive
    moments: dict[str, dict[str, float]] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundingError:
    """The error of a tensor that one rounding of each result makes.

    Attributes:
        error: root mean square of ``||g - exact||``.
        dimensions: the number of dimensions in which ``g - exact`` varies.
        samples: the number of samples from which these are estimated.
        along: root mean square of the part of ``g - exact`` in the direction of ``exact``.
        terms: the size of what is summed, which may cancel; 0 where it is not known.
        zeros: the share of the elements that become 0, as numbers do that are too small for fp16.
    """

    error: float
    dimensions: float
    samples: int
    along: float
    terms: float = 0.0
    zeros: float = 0.0


@dataclass(frozen=True)
class PlaceError:
    """The error at one place of a layer beside the forced replay: of what arrives there, of its output, or of the
    gradient that arrives at its output.

    Attributes:
        error: ``||recorded - exact||`` (Frobenius).
        norm: ``||exact||``.
        rounding, dimensions, samples, terms: as those of :class:`RoundingError`.
    """

    error: float
    norm: float
    rounding: float
    dimensions: float
    samples: int
    terms: float = 0.0

    @property
    def far(self) -> float:
        """The error in units of what roundings make."""
        return self.error / max(self.rounding, 2.0**-24 * self.norm, 1e-300)


@dataclass(frozen=True)
class Digits:
    """The cost of a precision of 16 bits at one layer, or in the work before it.

    Attributes:
        kind: the class of the layer; empty for the work before one.
        output: the error of its output if each of its operands and results is rounded once, relative to its norm.
        gradient: the same of what its backward computes: the gradients of its parameters as one vector, and those that
            it passes down as another; the larger of the two. 0 for the work before a layer.
        terms, gradient_terms: how many times larger what is summed is than these results; it cancels.
        loss: the change of the loss if its output is rounded once, relative to the loss.
        overflow: the share of its output, or of the gradient that arrives there, that is beyond the format.
        underflow: the share of that gradient, with the loss scale, that is below the format's normal numbers.
        operator: the first of its operators with a result beyond the format; empty where there is none.
        largest: the largest number in that result, times the loss scale in backward.
        in_backward: whether that operator is one of backward.
    """

    kind: str
    output: float = 0.0
    gradient: float = 0.0
    terms: float = 0.0
    gradient_terms: float = 0.0
    loss: float = 0.0
    overflow: float = 0.0
    underflow: float = 0.0
    operator: str = ""
    largest: float = 0.0
    in_backward: bool = False


@dataclass(frozen=True)
class Layers(Gradients):
    """A step beside its forced replay, which goes on at each layer from what the backend had there.

    Attributes:
        gradients: of the parameters, beside those that follow from the recorded operands.
        places: by ``input LAYER``, ``output LAYER``, ``gradient LAYER`` and ``buffer BUFFER`` the error there; of
            several calls that of the furthest one.
        rounding: the error that one rounding of each result makes in each gradient.
        detached: the layers that pass no gradient back from an output, and should.
        digits: by layer, or ``before LAYER`` for the work before it, what 16 bits cost there, in the order of forward;
            empty in other precisions.
        as_given: whether the network was called once for each micro-batch, with its rows as they are. Masks that are
            drawn for other rows are other masks.
    """

    places: dict[str, PlaceError] = field(default_factory=dict)
    rounding: dict[str, RoundingError] = field(default_factory=dict)
    detached: list[str] = field(default_factory=list)
    digits: dict[str, Digits] = field(default_factory=dict)
    as_given: bool = True


@dataclass(frozen=True)
class Again:
    """A step that was taken twice from one state.

    Attributes:
        seen: the names of what was looked at, ``loss`` and the gradients that are shown.
        apart: by name the distance between both, relative to the first, where any bit differs.
    """

    seen: list[str]
    apart: dict[str, float]


@dataclass(frozen=True)
class Padding:
    """A step at weights and inputs of 0.

    Attributes:
        loss: as the backend says.
        exact_loss: of a few rows in fp32, a finite number.
        finite: by tensor, of the gradients that are finite in fp32, whether the backend's is.
    """

    loss: float
    exact_loss: float
    finite: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """The owner of a tensor.

    Attributes:
        layer: its name.
        kind: its class.
        inside: the classes of the modules around it, the outermost first.
        part: the tensor's name in it, such as ``weight``.
        place: among the layers in the order of their calls; -1 for one that is no layer of its own.
        after: the layer whose output is its input as it is; empty where there is none.
        uses: how often the tensor is used in a step, as far as layers tell: a tied one by each of its layers, and by a
            layer as often as it is called.
    """

    layer: str
    kind: str
    inside: list[str]
    part: str
    place: int
    after: str = ""
    uses: int = 1


@dataclass(frozen=True)
class Reload:
    """A backend that loaded the state of another, beside that other, one step later.

    Attributes:
        step: loss and gradients of the backend that loaded, compared with the gradients of the backend that saved.
        next_scale: after it, where the one that saved says what it should be.
        error: the distance of their weights and buffers.
        norm: the distance that those of the first moved in the step.
        lost: the entries of the state that are others in the loaded backend.
        weights: the norm of the weights and buffers of the first after the step.
        update: the update of the one that loaded, replayed from the state; None where it cannot be followed.
    """

    step: Gradients
    next_scale: NextScale
    error: float
    norm: float
    lost: list[str]
    weights: float
    update: TrainedUpdate | None


@dataclass(frozen=True)
class Buffer:
    """A buffer that training has moved.

    Attributes:
        dtype, should_dtype: the format in which the backend shows it, and that of the network.
        sketch: of its numbers.
        whole: the value of a whole number, and a fingerprint of several; empty where the network has other numbers.
        elements: how many of its numbers are not 0.
        short: the share of these that have no more digits than a 16-bit format.
    """

    dtype: str
    should_dtype: str
    sketch: list[float]
    whole: str = ""
    elements: int = 0
    short: float = 0.0


Buffers = dict[str, Buffer]


@dataclass(frozen=True)
class HeldOut:
    """The network after training, in fp32 on some held-out samples.

    Attributes:
        loss: the mean over the samples.
        accuracy: None where the targets are no classes.
        targets: how many the accuracy is a share of.
    """

    loss: float
    accuracy: float | None
    targets: int


@dataclass(frozen=True)
class Moves:
    """How far each step of training moves some elements of the weights, which are the same ones in every run.

    Attributes:
        steps: the norm of the change of all of them, step by step.
        tensors: that of those of each parameter; of the first steps only where training is long.
        weights: the largest norm that those of each parameter had.
        short: step by step, how many of them that are not 0 have no more digits than the compute dtype.
    """

    steps: list[float]
    tensors: dict[str, list[float]]
    weights: dict[str, float]
    short: list[int]


@dataclass(frozen=True)
class Masks:
    """The random numbers of a step, such as the masks of dropout, from one state of torch's generators.

    Attributes:
        training: whether it draws in training what the network draws that is called as it is, for the same rows.
        samples: None where it draws the same numbers in training.
    """

    training: bool
    samples: "MaskSamples | None" = None


@dataclass(frozen=True)
class MaskSamples:
    """The first step with other random numbers each time.

    Attributes:
        losses, exact_losses: of the backend, and of the network that is called as it is, in fp32.
        slopes, exact_slopes: the number that times a mean gradient is closest to all gradients of such a step; without
            those of a backend that shows none, or clipped ones.
    """

    losses: list[float]
    exact_losses: list[float]
    slopes: list[float]
    exact_slopes: list[float]


@dataclass(frozen=True)
class NoiseRun:
    """Training once more, under changes that must not matter.

    Attributes:
        change: the changes in words.
        losses, skipped: step by step.
        moved: the change of each parameter, as a sketch.
        buffers: those that training moved, as it left them.
        held_out: loss and accuracy after it; None where there are no such samples.
        moves: of its steps.
    """

    change: str
    losses: list[float]
    skipped: list[bool]
    moved: dict[str, list[float]]
    buffers: Buffers
    held_out: HeldOut | None
    moves: Moves


@dataclass(frozen=True)
class WrongScale:
    """The first training step whose loss scale is not the one that its policy gives.

    Attributes:
        step: its number, from 1.
        loss_scale: as the backend says, before the step.
        should_scale: as the policy says.
    """

    step: int
    loss_scale: float
    should_scale: float


@dataclass(frozen=True)
class Recipe:
    """The settings of the task that decide how its numbers are read.

    Attributes:
        batch_size: rows of a step.
        accumulate: micro-batches of a step.
        clip_norm: None where nothing is clipped.
        clip_norm_type: the order of that norm.
        linear: whether an update is linear in the gradients.
        bounded: whether an update has a bound.
    """

    batch_size: int
    accumulate: int = 1
    clip_norm: float | None = None
    clip_norm_type: float = 2.0
    linear: bool = True
    bounded: bool = True


Counts = dict[str, dict[str, list[int]]]  # by group (activations, ...) and tensor or layer: numbers by their exponent


@dataclass(frozen=True)
class Findings:
    """Everything that examining one backend found.

    Attributes:
        precision: in which the backend was asked to compute.
        recipe: the part of the task that decides how numbers are read.
        longest_sum: about how many numbers are summed at most.
        layers: the owner of each parameter and buffer.
        first: from the initial weights.
        rounding: the error that one rounding of each result of the whole network makes in gradients and buffers of the
            first step; empty where a forced replay sees each layer by itself.
        last: the step after training beside a new backend with the same weights.
        overflow: with a loss scale that is too large; None without loss scaling.
        infinite: a step with an infinite input; None with loss scaling, where it is one of the pass ``overflow``.
        aged: a step from a state as it is after long training; None where it depends on no count.
        trained: the update of the step after training; None where it was skipped, or could not be followed.
        midway: an update in the middle of training; None without a schedule, and where it could not be followed.
        replays: steps beside their forced replays, by name: ``first``, ``sharp`` (at weights at which nothing is nearly
            linear), ``last`` (the step after training); empty where the backend does not show its layers.
        padding: a step at weights and inputs of 0; None of a network that divides by nothing.
        again: a step that was taken twice.
        resume: a state that was saved and loaded.
        masks: None where a step draws no random numbers.
        loss_scale: None where the loss scale of each training step is right.
        moved: the change of each parameter over training, as a sketch.
        moves: of its steps; None where nobody looked.
        buffers: those that training moved, as it left them.
        last_buffers: after the step that follows, beside those of a new backend that takes it, too.
        held_out: loss and accuracy after training, before that step; None where there are no such samples.
        noise: training again; empty where the noise was not measured.
        lent: ``network``, ``batch`` and ``torch``, as far as the backend changed them; None where nobody looked.
        exponents: numbers by their exponents, of the first step and after training (``first``, ``last``); empty where
            they were not counted.
        promises: the differences from ``amp`` that the backend declares.
        stopped: by name of a pass the error that it stopped with, in a line; what it would have found is empty.
        hidden: why the steps cannot be replayed layer by layer, though the backend shows its layers; empty where they
            can.
    """

    precision: str
    recipe: Recipe
    longest_sum: int
    layers: dict[str, Layer]
    first: Drive
    last: Gradients
    rounding: dict[str, RoundingError] = field(default_factory=dict)
    overflow: Drive | None = None
    infinite: Drive | None = None
    aged: Aged | None = None
    trained: TrainedUpdate | None = None
    midway: Drive | None = None
    replays: dict[str, Layers] = field(default_factory=dict)
    padding: Padding | None = None
    again: Again | None = None
    resume: Reload | None = None
    masks: Masks | None = None
    loss_scale: WrongScale | None = None
    moved: dict[str, list[float]] = field(default_factory=dict)
    buffers: Buffers = field(default_factory=dict)
    last_buffers: Errors = field(default_factory=dict)
    held_out: HeldOut | None = None
    moves: Moves | None = None
    noise: list[NoiseRun] = field(default_factory=list)
    exponents: dict[str, Counts] = field(default_factory=dict)
    lent: list[str] | None = None
    promises: Promises = field(default_factory=Promises)
    stopped: dict[str, str] = field(default_factory=dict)
    hidden: str = ""

    @property
    def drives(self) -> dict[str, Drive]:
        """By name the passes in which a new backend was driven from the initial state."""
        others = {"overflow": self.overflow, "infinite input": self.infinite}
        return {"first": self.first, **{name: drive for name, drive in others.items() if drive}}


_converter = cattrs.Converter(omit_if_default=True, detailed_validation=False)


def to_document(findings: Findings) -> dict[str, Any]:
    """The findings as plain values, which JSON can hold but for inf and NaN."""
    document: dict[str, Any] = _converter.unstructure(findings)
    return document


def from_document(document: dict[str, Any]) -> Findings:
    """The inverse of :func:`to_document`.

    Raises:
        ValueError, TypeError or KeyError: it is no such document.
    """
    return _converter.structure(document, Findings)
