"""Checkpoints of a run while it trains."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mpcompare.checkpoints import CHECKPOINTS, Checkpoint, save
from mpcompare.contract import Stepper
from mpcompare.entrant import generators
from mpcompare.entrant.going_on import Before
from mpcompare.entrant.plan import Training
from mpcompare.records import RunRecorder
from mpcompare.verdict.examine.moves import Digest


@dataclass(frozen=True)
class Saver:
    """Saves checkpoints of a run into its folder, and before each the moves of the weights up to there.

    Attributes:
        train: says when a checkpoint is saved.
        what_is_trained: :func:`mpcompare.entrant.resume.what_is_trained` of the run.
        before: the steps that were recorded before this process began.
        digest: the moves of the others; None where nobody looks.
    """

    recorder: RunRecorder
    train: Training
    what_is_trained: Mapping[str, Any]
    device: torch.device
    before: Before
    digest: Digest | None

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is saved after this step, counted from 1; the last one has one in any case."""
        every = self.train.checkpoint_every
        return every is not None and (step % every == 0 or step == self.train.last_step)

    def save(self, stepper: Stepper, step: int) -> None:
        """Saves the state of ``stepper`` after its first ``step`` steps; waits for the device, and for the disk.

        Raises:
            InputError: the folder cannot be written.
        """
        if self.digest is not None:
            self.recorder.moves(asdict(self.before.with_moves(self.digest.moves())))
        checkpoint = checkpoint_of(stepper, step, self.what_is_trained, self.device)
        save(self.recorder.folder / CHECKPOINTS, checkpoint)


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
