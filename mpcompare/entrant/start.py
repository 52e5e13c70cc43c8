"""The point where training begins: the initial weights, or a checkpoint; and the point from which it goes on here."""

from dataclasses import dataclass
from typing import cast

from mpcompare.checkpoints import Checkpoint
from mpcompare.contract import State, Stepper
from mpcompare.entrant import generators
from mpcompare.entrant.going_on import NOTHING, Before
from mpcompare.entrant.setup import Setup, Stream
from mpcompare.tasks.task import Params, params_of


@dataclass(frozen=True)
class Start:
    """The point where training begins.

    Attributes:
        checkpoint: as this process continues from it; None: training begins with the initial weights.
        before: the steps of the run before it, which are part of this training.
    """

    setup: Setup
    checkpoint: Checkpoint | None
    before: Before = NOTHING

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
