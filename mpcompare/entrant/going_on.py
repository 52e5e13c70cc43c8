"""A run that was killed goes on, in its own folder or in that of a new sweep, into which its files were taken.

It is the run that it was: its steps, its evaluations and the moves of its weights are kept up to the checkpoint, so
that its record is as if nobody had killed it. A run that was trained and examined is taken as it is, and only timed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpcompare.checkpoints import CHECKPOINTS, Checkpoint, load, newest
from mpcompare.entrant.plan import Plan
from mpcompare.records import EXAMINED, MOVES, RunRecorder, numbers
from mpcompare.verdict.examine.moves import NUMBERS
from mpcompare.verdict.judge.moves import Moves


@dataclass(frozen=True)
class Before:
    """The part of a training that was recorded before this process began."""

    rows: list[dict[str, Any]]  # of ``steps.csv``, from the first step of training on
    moves: Moves | None  # of the weights in these steps; None where nobody looked

    def with_moves(self, after: Moves) -> Moves:
        """Returns the moves of these steps and of those ``after`` them."""
        if self.moves is None:
            return after
        few = max(1, NUMBERS // len(after.tensors))
        return Moves(
            steps=self.moves.steps + after.steps,
            tensors={name: (self.moves.tensors[name] + norms)[:few] for name, norms in after.tensors.items()},
            weights={name: max(self.moves.weights[name], norm) for name, norm in after.weights.items()},
            short=self.moves.short + after.short,
        )


NOTHING = Before([], None)


def find(plan: Plan, result: Mapping[str, Any]) -> Checkpoint | None:
    """Returns the checkpoint from which a run goes on, verified; None where it begins anew, for there is none.

    Without an examination in ``result`` it is one that leaves a step to take: what is examined has trained.
    Raises InputError where it is damaged.
    """
    assert plan.resume.folder is not None
    path = newest(plan.resume.folder / CHECKPOINTS, before=plan.train.last_step + (EXAMINED in result))
    return None if path is None else load(path, older=plan.resume.older)


def before(recorder: RunRecorder, step: int, moves: bool) -> Before | None:
    """Returns the record up to ``step``, and leaves nothing after it; None where a part of it is missing.

    Args:
        moves: whether those of the weights belong to it.
    """
    rows, file = recorder.keep(step), recorder.folder / MOVES
    if [row["step"] for row in rows] != list(range(1, step + 1)) or (moves and not file.exists()):
        recorder.keep(0)
        return None
    if not moves:
        return Before(rows, None)
    whole = Moves(**numbers(json.loads(file.read_text())))
    # Some may have been recorded whose checkpoint was not saved any more.
    tensors = {name: norms[:step] for name, norms in whole.tensors.items()}
    return Before(rows, Moves(whole.steps[:step], tensors, whole.weights, whole.short[:step]))
