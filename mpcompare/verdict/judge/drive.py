"""The steps of a backend that was driven, and what was seen of each."""

from dataclasses import dataclass, field

from mpcompare.verdict.judge.accumulation import MicroBatches
from mpcompare.verdict.judge.errors import Errors


@dataclass(frozen=True)
class Gradients:
    """Loss and gradients of one step compared with exact ones."""

    loss: float  # the loss, as the backend says
    exact_loss: float  # the loss in float64
    loss_noise: float  # standard deviation of the loss if each stored activation is rounded once
    gradients: Errors = field(default_factory=dict)  # the error of each gradient; empty where the backend shows none
    micro_batches: MicroBatches | None = None  # None where the step has only one, or no gradients are shown
    of_tensors: dict[str, MicroBatches] = field(default_factory=dict)  # the counts for each gradient by itself
    subnormal: float = 0.0  # the share of the activations' gradients, times the loss scale, below fp16's normal numbers
    effective_precision: str | None = None  # the precision that the gradients show; None where none are shown


@dataclass(frozen=True)
class UpdateError:
    """The change of a tensor compared with the change that fp32 arithmetic makes of the shown gradients."""

    excess: float  # the largest error over its bound
    slope: float  # the change over the right one
    lost: float  # the share of elements that should have moved and did not
    lost_in_fp32: float  # the share of elements whose moves fp32 rounds away
    short: float  # the share of the new elements that have no more digits than the compute dtype
    # the share of elements that should have moved and did not, though the compute dtype would not round their moves
    # away
    left: float
    # far, should_far: for weights that are kept in bf16, the number of new elements that are more than half a bf16 gap
    # from the right ones, and the number of such elements that rounding at random makes on average
    far: int = 0
    should_far: float = 0.0


@dataclass(frozen=True)
class ClipFactor:
    """The effect of clipping on one gradient, which becomes ``factor`` times itself, plus a rest."""

    factor: float  # by least squares
    rest: float  # the norm of the rest over ``norm``
    norm: float  # the norm of the gradient before clipping


@dataclass(frozen=True)
class Clip:
    """The norms of one step's gradients before and after clipping, and the factor of each."""

    norm: float  # the norm of all gradients before clipping, as the backend says
    norm_after: float  # the norm of the clipped gradients
    clip_norm: float  # the norm to which the task clips
    norm_type: float  # the order of the norm by which the task clips
    elements: int  # the number of all elements
    should_norm: float | None = None  # the norm before; None where it cannot be seen
    should_factor: float | None = None  # the factor that follows from it
    factors: dict[str, ClipFactor] = field(default_factory=dict)  # by tensor; empty where ``should_norm`` is None


@dataclass(frozen=True)
class Step:
    """The loss scale and the weights in one step."""

    finite: bool  # whether the gradients were, as far as they are shown
    skipped: bool  # whether the backend says that it skipped
    should_skip: bool  # whether the policy of the loss scale skips
    moved: bool  # whether a weight changed
    loss_scale: float  # the loss scale before the step, as the backend says
    should_scale: float  # the loss scale by the policy: the backend's own policy where it promises one
    asked_scale: float | None = None  # the loss scale by the policy asked for; None where both policies are the same
    moved_early: bool = False  # whether a weight changed before the gradients of all micro-batches were there
    finite_after_clip: bool = False  # whether the clipped gradients were finite
    # whether no weight is left that should move: the learning rate was 0, the update is 0, or fp32 rounds it away
    at_rest: bool = False


@dataclass(frozen=True)
class NextScale:
    """The loss scale before the next step: as the backend says, and as its policy says."""

    loss_scale: float
    should_scale: float


@dataclass(frozen=True)
class KnownMistake:
    """A known mistake that wrong updates are compared with: its cause, and the largest error over its bound of the
    updates compared with updates that are made by the mistake."""

    cause: str
    excess: float


@dataclass(frozen=True)
class Drive:
    """A new backend that was driven for some steps."""

    steps: list[Step] = field(default_factory=list)  # in their order
    updates: list[dict[str, UpdateError]] = field(default_factory=list)  # the updates that were taken, by tensor
    clips: list[Clip] = field(default_factory=list)  # the clipping of these updates, where the task clips
    next_scale: NextScale | None = None  # after the last step
    finite: Gradients | None = None  # the first step of the first batch whose gradients are finite; None where none is
    # the buffers after the first step, skipped or not, compared with the oracle's; empty where there are none
    buffers: Errors = field(default_factory=dict)
    # the known mistakes, by words that go on after "made"; empty where the updates are right
    known_mistakes: dict[str, KnownMistake] = field(default_factory=dict)
    # by kind of the optimizer's tensors, the share of numbers that have no more digits than a 16-bit format; empty
    # where the updates are right, unless the backend promises moments of such a format
    digits: dict[str, float] = field(default_factory=dict)
    # the kinds of the optimizer's tensors that hold another number than 0 before the first update
    early: list[str] = field(default_factory=list)
    # for each update, whether each parameter without a gradient moved; empty where all have one in every update
    idle: list[dict[str, bool]] = field(default_factory=list)

    @property
    def gradients(self) -> Errors:
        """The errors in the finite step; empty where there is none, or it shows none."""
        return self.finite.gradients if self.finite else {}

    @property
    def first_scale(self) -> float:
        """The loss scale of the first step whose gradients are finite, or else of the first step; 1 without steps."""
        return next((s.loss_scale for s in self.steps if s.finite), self.steps[0].loss_scale if self.steps else 1.0)
