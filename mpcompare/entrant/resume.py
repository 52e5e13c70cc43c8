"""A run that continues from a checkpoint.

The state in a checkpoint is that of all backends, so another backend may continue from it, in another precision. The
task, its data, the seed and the initial weights have to be the same.

A run that continues has the rows of its own steps in ``steps.csv``; those before them are in the record of the run that
took them. The examination of its training begins where it began.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mpcompare.checkpoints import Checkpoint, load
from mpcompare.entrant.plan import Plan
from mpcompare.entrant.setup import Setup
from mpcompare.errors import InputError
from mpcompare.fields import ResumeFields
from mpcompare.loss_scale import DynamicLossScale, LossScale
from mpcompare.records import finite, named_fields
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.task import buffers_of, params_of

# Must be the same in a run that continues. Its backend, precision and loss scale need not be.
SAME = ("task", "seed", "schedule_updates", "dataset_fingerprint", "initial_weights")
NAMED = 3  # fields that a message names where more differ: another task differs in nearly all


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


def find(plan: Plan) -> Checkpoint | None:
    """Returns the checkpoint that a run is to continue from, verified, of several the last that leaves a step to take;
    None where it is to begin at the beginning. Raises InputError where there is none, it is damaged, or it leaves no
    step to take."""
    folder, last_step = plan.resume.folder, plan.train.last_step
    if folder is None:
        return None
    checkpoint = load(folder, plan.resume.older, before=last_step)
    if checkpoint.step >= last_step:
        expected = f"has taken {checkpoint.step} steps, and this run ends after {last_step}"
        raise InputError("resume", folder, f"{expected} (train.warmup_steps + train.steps)")
    return checkpoint


def fit(checkpoint: Checkpoint, trained: Mapping[str, Any], loss_scale: LossScale, folder: Path | None) -> Checkpoint:
    """Returns the checkpoint as this run continues from it.

    A dynamic loss scale goes on from a dynamic one. Any other begins as it is configured.

    Args:
        trained: :func:`what_is_trained` of this run.
        loss_scale: of this run, as it is configured.
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
        if "growth_tracker" in state:  # beyond a shorter interval it would never grow again
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
    """Returns what a record says of the checkpoint from which a run continues, which was found in ``folder``."""
    trained = checkpoint.what_is_trained
    return ResumeFields(
        path=str(folder),
        step=checkpoint.step,
        backend=trained.get("backend"),
        precision=trained.get("precision"),
        weights=fingerprint(checkpoint.state["params"]),
    )
