"""A run that continues from a checkpoint: of another run, or its own where it was killed.

All backends have the same kind of state in a checkpoint, so another backend may continue from it, in another precision.
The task, its data, the seed and the initial weights have to be the same. A run that continues another has the rows of
its own steps in ``steps.csv``. Earlier rows are in the record of the run that took these steps. The examination begins
where the training of this run began.

A run that was killed goes on, in its own folder or in the folder of a new sweep, into which its files were taken. Its
steps, its evaluations and the moves of its weights are kept up to the checkpoint, so that its record is as if nobody
had killed it. A run that was trained and examined is taken as it is, and only timed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mpcompare.checkpoints import CHECKPOINTS, Checkpoint, load, newest
from mpcompare.entrant.plan import Plan
from mpcompare.entrant.setup import Setup
from mpcompare.errors import InputError
from mpcompare.fields import ResumeFields
from mpcompare.loss_scale import DynamicLossScale, LossScale
from mpcompare.records import EXAMINED, MOVES, RunRecorder, finite, named_fields, numbers
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.task import buffers_of, params_of
from mpcompare.verdict.examine.moves import NUMBERS
from mpcompare.verdict.judge.moves import Moves

# Fields that must be the same in a run that continues. Its backend, precision and loss scale may differ.
SAME = ("task", "seed", "schedule_updates", "dataset_fingerprint", "initial_weights")
NAMED = 3  # fields that a message names where more differ: another task differs in nearly all


@dataclass(frozen=True)
class Before:
    """The part of a training that was recorded before this process began."""

    rows: list[dict[str, Any]]  # the rows of ``steps.csv``, from the first step of training on
    moves: Moves | None  # the moves of the weights in these steps; None where nobody looked

    def with_moves(self, after: Moves) -> Moves:
        """Returns the moves of these steps, and then the moves ``after`` them."""
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


def what_is_trained(plan: Plan, setup: Setup) -> dict[str, Any]:
    """Returns the task, data, seed and initial weights by the names of ``SAME``, and the backend that trains them."""
    return {
        "backend": plan.backend,
        "precision": setup.record.precision,
        "loss_scale": setup.loss_scale.name,
        "task": dict(plan.task_config),
        "seed": plan.seed,
        "schedule_updates": setup.task.schedule.length,  # a cosine is spread over all steps of a run
        "dataset_fingerprint": setup.record.dataset_fingerprint,
        "initial_weights": setup.record.initial_weights,
    }


def find(plan: Plan, result: Mapping[str, Any]) -> Checkpoint | None:
    """Returns the verified checkpoint that a run is to continue from. Of several it is the last that leaves a step to
    take. None where the run is to begin at the beginning.

    A run that goes on begins anew if its own folder has no checkpoint. A run that was examined, as ``result`` says,
    need not have a step left. Raises InputError where a checkpoint is damaged, and where another run has no checkpoint
    that leaves a step to take."""
    folder, last_step = plan.resume.folder, plan.train.last_step
    if folder is None:
        return None
    if plan.resume.goes_on:
        path = newest(folder / CHECKPOINTS, before=last_step + (EXAMINED in result))  # an examined run has trained
        return None if path is None else load(path, plan.resume.older)
    checkpoint = load(folder, plan.resume.older, before=last_step)
    if checkpoint.step >= last_step:
        expected = f"has taken {checkpoint.step} steps, and this run ends after {last_step}"
        raise InputError("resume", folder, f"{expected} (train.warmup_steps + train.steps)")
    return checkpoint


def fit(checkpoint: Checkpoint, trained: Mapping[str, Any], loss_scale: LossScale, folder: Path | None) -> Checkpoint:
    """Returns the checkpoint as this run continues from it.

    A dynamic loss scale goes on from a dynamic one. Any other loss scale begins as it is configured.

    Args:
        trained: :func:`what_is_trained` of this run.
        loss_scale: the loss scale of this run, as it is configured.
        folder: the place where the checkpoint was found, for messages.

    Raises:
        InputError: something else was trained; the message names the fields that differ.
    """
    before, now = (_fields(each) for each in (checkpoint.what_is_trained, trained))
    if differing := [key for key in dict.fromkeys((*before, *now)) if before.get(key) != now.get(key)]:
        shown, more = differing[:NAMED], len(differing) - NAMED
        was, has = (", ".join(f"{key}={fields.get(key)}" for key in shown) for fields in (before, now))
        rest = f"; and {more} more differ" if more > 0 else ""
        raise InputError("resume", folder, f"was trained with {was}, this run has {has}{rest}")
    state: dict[str, float] = {}
    if isinstance(loss_scale, DynamicLossScale) and checkpoint.what_is_trained.get("loss_scale") == loss_scale.name:
        state = dict(checkpoint.state["loss_scale"])
        if "growth_tracker" in state:  # beyond a shorter interval the scale would never grow again
            state["growth_tracker"] = min(state["growth_tracker"], loss_scale.growth_interval - 1)
    return replace(checkpoint, state={**checkpoint.state, "loss_scale": state})


def check_tensors(checkpoint: Checkpoint, model: nn.Module, folder: Path | None) -> None:
    """Raises InputError unless a checkpoint holds the tensors of this network: parameters and buffers by name and shape
    alike, and the optimizer's, each of the shape of its parameter or a number."""
    params, buffers = params_of(model), buffers_of(model)
    for group, expected in (("params", params), ("buffers", buffers)):
        found = checkpoint.state[group]
        if missing := [name for name in expected if name not in found]:
            raise InputError("resume", folder, f"its {group} lack {missing[0]}")
        for name, tensor in found.items():
            _check_shape(folder, f"{group} {name}", tensor, [expected[name].shape] if name in expected else [])
    for kind, tensors in checkpoint.state["optimizer"].items():
        for name, tensor in tensors.items():
            _check_shape(folder, f"{kind} {name}", tensor, [params[name].shape, ()] if name in params else [])


def _check_shape(folder: Path | None, name: str, tensor: Tensor, accepted: Sequence[Sequence[int]]) -> None:
    if list(tensor.shape) not in (shapes := [list(shape) for shape in accepted]):
        expected = f"this network has {shapes[0]}" if shapes else "this network has no such tensor"
        raise InputError("resume", folder, f"holds {name} of shape {list(tensor.shape)}, and {expected}")


def _fields(trained: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every field of ``SAME``, such as ``task.optimizer.lr``, as JSON gives it back."""
    return {field: v for key in SAME for field, v in named_fields(key, finite(trained.get(key))).items()}


def describe(checkpoint: Checkpoint, folder: Path | None) -> ResumeFields:
    """Returns the record of the checkpoint from which a run continues, and which was found in ``folder``."""
    trained = checkpoint.what_is_trained
    return ResumeFields(
        path=str(folder),
        step=checkpoint.step,
        backend=trained.get("backend"),
        precision=trained.get("precision"),
        weights=fingerprint(checkpoint.state["params"]),
    )


def before(recorder: RunRecorder, step: int, moves: bool) -> Before | None:
    """Returns the record up to ``step``, and leaves nothing after it; None where a part of it is missing.

    Args:
        moves: whether the moves of the weights belong to the record.
    """
    rows, file = recorder.keep(step), recorder.folder / MOVES
    if [row["step"] for row in rows] != list(range(1, step + 1)) or (moves and not file.exists()):
        recorder.keep(0)
        return None
    if not moves:
        return Before(rows, None)
    whole = Moves(**numbers(json.loads(file.read_text())))
    # Some steps may have been recorded after the last checkpoint that was saved.
    tensors = {name: norms[:step] for name, norms in whole.tensors.items()}
    return Before(rows, Moves(whole.steps[:step], tensors, whole.weights, whole.short[:step]))
