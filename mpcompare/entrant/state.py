"""The state of one entrant, which goes from pass to pass."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from mpcompare import generators
from mpcompare.checkpoints import Checkpoint
from mpcompare.clean_process import CleanProcess
from mpcompare.contract import State, Stepper
from mpcompare.entrant.evaluation import Scores
from mpcompare.entrant.plan import Plan
from mpcompare.entrant.resume import NOTHING, Before
from mpcompare.entrant.setup import Setup, Stream
from mpcompare.instruments import meter
from mpcompare.race.orders import Order, Progress, Turn
from mpcompare.records import RunRecorder
from mpcompare.shared import Shared
from mpcompare.tasks.task import Params, params_of
from mpcompare.verdict.findings import Moves

Part = TypeVar("Part")
Pass = Generator[Progress | Turn, Order | None, Part]  # returns its part of ``result.json``
Fields = dict[str, Any]  # some fields by their names; empty for a pass that records nothing


class ExaminedMemory:
    """The memory that an examination took, in the entrant's process and in the process that computes its oracle."""

    def __init__(self, clean: CleanProcess | None) -> None:
        self.pid = None if clean is None else clean.pid
        self.own, self.of_clean = meter.rss_bytes(), self._of_clean(meter.rss_bytes)
        self.rest: int | None = None

    def begin(self) -> int | None:
        """Is told that the examination begins. Returns the bytes that the own process holds then, beyond the bytes that
        it held before; None where they are not known."""
        self.rest = meter.rss_bytes() if meter.reset_peak_rss() else None
        return None if self.rest is None or self.own is None else max(self.rest - self.own, 0)

    def peak(self) -> int | None:
        """Returns the most bytes that both processes took together in the examination, beyond the bytes before; None
        where they are not known. While one process works, the other one waits."""
        own = meter.peak_rss_bytes()
        if self.rest is None or self.own is None or own is None:
            return None
        now, peak = self._of_clean(meter.rss_bytes), self._of_clean(meter.peak_rss_bytes)
        if self.of_clean is None or now is None or peak is None:
            return max(own - self.own, 0)  # a process that gives memory back meanwhile may end with less
        return max(own + now - self.own - self.of_clean, self.rest + peak - self.own - self.of_clean, 0)

    def _of_clean(self, measure: Callable[[int | None], int | None]) -> int | None:
        return None if self.pid is None else measure(self.pid)


@dataclass(frozen=True)
class Start:
    """The point where training begins."""

    setup: Setup
    checkpoint: Checkpoint | None  # the checkpoint that this process continues from; None: the initial weights
    before: Before = NOTHING  # the steps of the run before it, which are part of this training

    @property
    def origin(self) -> Checkpoint | None:
        """The checkpoint where this training began; None: it began with the initial weights."""
        return None if self.before.rows else self.checkpoint

    @property
    def step(self) -> int:
        """The number of steps that were taken before."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def params(self) -> Params:
        """The fp32 parameters with which training began, under the module's names."""
        return params_of(self.setup.model) if self.origin is None else self.origin.state["params"]

    def batches(self) -> Stream:
        """Yields the training batches from here on."""
        return self.setup.batches(0 if self.checkpoint is None else self.checkpoint.position)

    def new_stepper(self) -> Stepper:
        """Returns a backend in this state, at its next learning rate; a checkpoint's random generators are restored."""
        if self.checkpoint is None:
            return self.setup.new_stepper()
        stepper = self.setup.stepper_at(cast(State, self.checkpoint.state), self.checkpoint.updates)
        generators.restore(self.checkpoint.generators, self.setup.device)
        return stepper


@dataclass(frozen=True)
class Trained:
    """The end of training."""

    rows: list[dict[str, Any]]  # the rows of ``steps.csv``, from the first step of the run on
    state: Callable[[], State]  # returns a copy of the backend's state, the same copy each time; nobody writes into it
    updates: int  # the number of updates that led to this state
    scores: Scores  # loss and accuracy on the held-out samples
    moved: dict[str, Any]  # the sketch (``verdict/examine/numerics.py``) of how far each parameter was moved
    moves: Moves | None = None  # how far each step moved some elements; None where the backend is not examined


@dataclass(frozen=True)
class Trial:
    """The length of a timed block, as it was tried out."""

    steps: int  # the number of its steps
    untimed: int  # the number of steps before it that are not timed


@dataclass(eq=False)
class Entrant:
    """Everything that one pass leaves for a later one. Each pass says what it needs and what it leaves."""

    plan: Plan
    recorder: RunRecorder
    shared: Shared  # values that the entrants of a race compute once: the data set, the float64 oracle
    clean: CleanProcess | None  # a process in which no backend has been, for the oracle; None: there is none
    # the checkpoint that training continues from, as it was saved; None: training begins anew
    checkpoint: Checkpoint | None = field(init=False)
    taken: bool = field(init=False)  # whether the run was trained and examined before, and is taken as it is
    memory: ExaminedMemory = field(init=False)  # the memory of this process and ``clean``, since before ``setup``
    setup: Setup = field(init=False)  # everything that is made once
    start: Start = field(init=False)  # the point where training begins
    # the backend that was trained, and is never loaded. If it is examined, it takes a timed block in the end, while no
    # clock runs; else it is gone when timing begins.
    stepper: Stepper = field(init=False)
    trained: Trained = field(init=False)  # the end of training
    trial: Trial = field(init=False)  # the length of a timed block
