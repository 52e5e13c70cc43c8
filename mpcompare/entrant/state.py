"""The state of one entrant, which goes from pass to pass."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mpcompare.checkpoints import Checkpoint
from mpcompare.clean_process import CleanProcess
from mpcompare.contract import State, Stepper
from mpcompare.entrant.evaluation import Scores
from mpcompare.entrant.examined_memory import ExaminedMemory
from mpcompare.entrant.plan import Plan
from mpcompare.entrant.setup import Setup
from mpcompare.entrant.start import Start
from mpcompare.race.orders import Order, Progress, Turn
from mpcompare.records import RunRecorder
from mpcompare.shared import Shared
from mpcompare.verdict.findings import Moves

Part = TypeVar("Part")
Pass = Generator[Progress | Turn, Order | None, Part]  # returns its part of ``result.json``
Fields = dict[str, Any]  # some by their names; none of a pass that records nothing


@dataclass(frozen=True)
class Trained:
    """The end of training.

    Attributes:
        rows: those of ``steps.csv``, from the first step of the run on.
        read: returns a copy of the backend's state, the same one each time; nobody writes into it.
        updates: the number of updates that led to it.
        scores: loss and accuracy on the held-out samples.
        moved: the sketch (``verdict/examine/numerics.py``) of how far each parameter was moved.
        moves: how far each step moved some of their elements; None where the backend is not examined.
    """

    rows: list[dict[str, Any]]
    read: Callable[[], State]
    updates: int
    scores: Scores
    moved: dict[str, Any]
    moves: Moves | None = None

    @property
    def state(self) -> State:
        """The backend's state."""
        return self.read()


@dataclass(frozen=True)
class Trial:
    """The length of a timed block, as it was tried out.

    Attributes:
        steps: the number of its steps.
        untimed: the number of steps before it that are not timed.
    """

    steps: int
    untimed: int


@dataclass(eq=False)
class Entrant:
    """Everything that one pass leaves for a later one. Each pass says what it needs and what it leaves.

    Attributes:
        shared: values that the entrants of a race compute once: the data set, the float64 oracle.
        clean: a process in which no backend has been, for the oracle; None: there is none.
        checkpoint: the one that training continues from, as it was saved; None: training begins anew.
        taken: whether the run was trained and examined before, and that is taken as it is.
        memory: of this process and ``clean``, from before ``setup`` on.
        setup: everything that is made once.
        start: the point where training begins.
        stepper: the backend that was trained, and is never loaded. One that is examined takes a timed block in the end,
            outside of any clock; any other is gone when timing begins.
        trained: the end of training.
        trial: the length of a timed block.
    """

    plan: Plan
    recorder: RunRecorder
    shared: Shared
    clean: CleanProcess | None
    checkpoint: Checkpoint | None = field(init=False)
    taken: bool = field(init=False)
    memory: ExaminedMemory = field(init=False)
    setup: Setup = field(init=False)
    start: Start = field(init=False)
    stepper: Stepper = field(init=False)
    trained: Trained = field(init=False)
    trial: Trial = field(init=False)
