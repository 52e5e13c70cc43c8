"""Training, with every step recorded."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mpcompare.contract import State, Stepper
from mpcompare.entrant.evaluation import Evaluations, Scores
from mpcompare.entrant.monitor import Monitor
from mpcompare.entrant.rows import Rows
from mpcompare.entrant.saving import Saver
from mpcompare.entrant.setup import Stream
from mpcompare.race.orders import Progress
from mpcompare.verdict.judge.moves import Moves

WRITE_EVERY_S = 0.1  # steps are written at least this often


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


def train(
    stepper: Stepper,
    stream: Stream,
    rows: Rows,
    last_step: int,
    monitor: Monitor | None = None,
    evaluations: Evaluations | None = None,
    saver: Saver | None = None,
) -> Generator[Progress, Any, None]:
    """Trains up to the step number ``last_step``. However it ends, the rows of all steps that were taken are on disk.

    Args:
        monitor: takes the steps that are due to be looked into.
        evaluations: evaluates after steps, the last one excluded, which is its caller's.
        saver: saves checkpoints, of each of which all rows are on disk before; its time is in no step's.
    """
    begun, written = rows.begun, time.monotonic()
    yield Progress(begun, last_step, "first step" if begun == 0 else f"first step after {begun}")
    try:
        for number, batch in enumerate(islice(stream, last_step - begun), start=begun + 1):
            rows.take_step(stepper, batch, monitor if monitor and monitor.due(number) else None)
            if evaluations and evaluations.due(number) and number < last_step:
                evaluations.take(number, stepper.backend)
            saves = saver is not None and saver.due(number)
            if saves or time.monotonic() - written > WRITE_EVERY_S or number == last_step:
                rows.write()
                if saver is not None and saves:
                    saver.save(stepper, number)
                written = time.monotonic()
                yield _progress(rows.written[-1], last_step)
    finally:
        rows.write()


def _progress(row: dict[str, Any], last_step: int) -> Progress:
    number, warmup = row["step"], "  warm-up" if row["warmup"] else ""
    text = f"{number}/{last_step}  loss {row['loss']:.4f}  {row['step_ms']:.4g} ms/step{warmup}"
    return Progress(number, last_step, text)
