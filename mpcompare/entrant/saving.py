"""Checkpoints of a run while it trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpcompare.checkpoints import Checkpoint, save
from mpcompare.contract import Stepper
from mpcompare.entrant import generators


@dataclass(frozen=True)
class Saver:
    """Saves checkpoints of a run.

    Attributes:
        folder: for them.
        every: a checkpoint is saved after each step whose number is a multiple of this; None: none is.
        what_is_trained: :func:`mpcompare.entrant.resume.what_is_trained` of the run.
    """

    folder: Path
    every: int | None
    what_is_trained: Mapping[str, Any]
    device: torch.device

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is saved after this step, counted from 1."""
        return self.every is not None and step % self.every == 0

    def save(self, stepper: Stepper, step: int) -> None:
        """Saves the state of ``stepper`` after its first ``step`` steps; waits for the device, and for the disk.

        Raises:
            InputError: the folder cannot be written.
        """
        save(self.folder, checkpoint_of(stepper, step, self.what_is_trained, self.device))


def checkpoint_of(stepper: Stepper, step: int, what_is_trained: Mapping[str, Any], device: torch.device) -> Checkpoint:
    """Returns everything that the steps after ``step`` depend on. Its tensors are the backend's own, which the next
    step changes."""
    return Checkpoint(
        state=stepper.backend.state_dict(),
        step=step,
        updates=int(stepper.rates.updates),
        position=step,  # a batch a step
        what_is_trained=what_is_trained,
        generators=generators.states(device),
    )
