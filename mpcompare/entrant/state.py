"""The state of one entrant, which goes from pass to pass."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeVar

from mpcompare.apart import Apart
from mpcompare.checkpoints import Checkpoint
from mpcompare.contract import Stepper
from mpcompare.entrant.examined_memory import ExaminedMemory
from mpcompare.entrant.plan import Plan
from mpcompare.entrant.setup import Setup
from mpcompare.entrant.start import Start
from mpcompare.entrant.timing import Trial
from mpcompare.entrant.training import Trained
from mpcompare.race.orders import Order, Progress, Turn
from mpcompare.records import RunRecorder
from mpcompare.shared import Shared

Part = TypeVar("Part")
Pass = Generator[Progress | Turn, Order | None, Part]  # returns a frozen dataclass, its part of ``result.json``


@dataclass(frozen=True)
class Nothing:
    """The part of a pass that has none."""


@dataclass(eq=False)
class Entrant:
    """Everything that one pass leaves for a later one. Each pass says what it needs and what it leaves.

    Attributes:
        shared: values that the entrants of a race compute once: the data set, the float64 oracle.
        apart: a process in which no backend has been, for the oracle; None: there is none.
        checkpoint: the one that training continues from, as it was saved; None: training begins anew.
        taken: whether the run was trained and examined before, and that is taken as it is.
        memory: of this process and ``apart``, from before ``setup`` on.
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
    apart: Apart | None
    checkpoint: Checkpoint | None = field(init=False)
    taken: bool = field(init=False)
    memory: ExaminedMemory = field(init=False)
    setup: Setup = field(init=False)
    start: Start = field(init=False)
    stepper: Stepper = field(init=False)
    trained: Trained = field(init=False)
    trial: Trial = field(init=False)
