"""Checkpoints of a run, and a run that continues from one.

The state in a checkpoint is that of all backends, so another backend may continue from it, in another precision. What
is trained has to be the same: the task, its data, the seed and the initial weights.

A run that continues has the rows of its own steps in ``steps.csv``; those before them are in the record of the run that
took them. What examines its training begins where it began.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from mpcompare.checkpoints import Checkpoint, load, save
from mpcompare.contract import State, Stepper
from mpcompare.entrant import generators
from mpcompare.entrant.plan import Plan
from mpcompare.entrant.setup import Setup
from mpcompare.errors import InputError
from mpcompare.loss_scale import DynamicLossScale, LossScale
from mpcompare.records import finite, named_fields
from mpcompare.tasks.fingerprint import fingerprint

# What must be the same in a run that continues. How it computes need not be: backend, precision, loss scale.
SAME = ("task", "seed", "schedule_updates", "dataset_fingerprint", "initial_weights")
NAMED = 3  # of the fields that differ; another task differs in nearly all


@dataclass(frozen=True)
class Saver:
    """Saves checkpoints of a run while it trains.

    Attributes:
        folder: for them.
        every: after each step whose number is a multiple of this.
        identity: :func:`identity` of the run.
    """

    folder: Path
    every: int
    identity: Mapping[str, Any]
    device: torch.device

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def save(self, stepper: Stepper, step: int) -> None:
        """Saves what ``stepper`` has become in its first ``step`` steps; waits for the device, and for the disk.

        Raises:
            InputError: the folder cannot be written.
        """
        save(self.folder, checkpoint_of(stepper, step, self.identity, self.device))


def saver_of(plan: Plan, identity: Mapping[str, Any], device: torch.device) -> Saver | None:
    """None where no checkpoints are asked for."""
    every = plan.checkpoint_every
    return None if every is None else Saver(plan.checkpoints, every, identity, device)


def checkpoint_of(stepper: Stepper, step: int, identity: Mapping[str, Any], device: torch.device) -> Checkpoint:
    """Everything that the steps after ``step`` depend on. Its tensors are the backend's own, which the next step
    changes."""
    return Checkpoint(
        state=stepper.backend.state_dict(),
        step=step,
        updates=int(stepper.rates.updates),
        position=step,  # a batch a step
        identity=identity,
        generators=generators.states(device),
    )


def identity(plan: Plan, setup: Setup, result: Mapping[str, Any]) -> dict[str, Any]:
    """What is trained, by the names of ``SAME``, and how it is computed.

    Args:
        result: the record so far.
    """
    return {
        "backend": plan.backend,
        "precision": setup.precision,
        "loss_scale": setup.loss_scale.name,
        "task": dict(plan.task_config),
        "seed": plan.seed,
        "schedule_updates": setup.task.schedule.length,  # a cosine is spread over all steps of a run
        **{key: result[key] for key in ("dataset_fingerprint", "initial_weights")},
    }


def find(plan: Plan) -> Checkpoint | None:
    """The checkpoint that a run is to continue from, verified; None where it is to begin at the beginning.

    Raises:
        InputError: there is none, it is damaged, or it leaves no step to take.
    """
    if plan.resume is None:
        return None
    found = load(plan.resume, older=plan.resume_older)
    if found.step >= plan.total:
        expected = f"has taken {found.step} steps, and this run ends after {plan.total}"
        raise InputError("resume", plan.resume, f"{expected} (train.warmup_steps + train.steps)")
    return found


def fit(found: Checkpoint, mine: Mapping[str, Any], policy: LossScale, resume: Path | None) -> Checkpoint:
    """The checkpoint as this run continues from it.

    A dynamic loss scale goes on from a dynamic one. Any other begins as it is configured.

    Args:
        mine: :func:`identity` of this run.
        policy: of this run, as it is configured.
        resume: where the checkpoint comes from.

    Raises:
        InputError: something else was trained; it names in what they differ.
    """
    theirs, ours = (_trained(each) for each in (found.identity, mine))
    if differing := [key for key in dict.fromkeys((*theirs, *ours)) if theirs.get(key) != ours.get(key)]:
        shown, more = differing[:NAMED], len(differing) - NAMED
        was, has = (", ".join(f"{key}={values.get(key)}" for key in shown) for values in (theirs, ours))
        rest = f"; and {more} more differ" if more > 0 else ""
        raise InputError("resume", resume, f"was trained with {was}, this run has {has}{rest}")
    scale: dict[str, float] = {}
    if isinstance(policy, DynamicLossScale) and found.identity.get("loss_scale") == policy.name:
        scale = dict(found.state["loss_scale"])
        if "growth_tracker" in scale:  # beyond a shorter interval it would never grow again
            scale["growth_tracker"] = min(scale["growth_tracker"], policy.growth_interval - 1)
    return replace(found, state={**found.state, "loss_scale": scale})


def _trained(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of what is trained, such as ``task.optimizer.lr``, as JSON gives it back."""
    return {field: v for key in SAME for field, v in named_fields(key, finite(identity.get(key))).items()}


def continue_from(setup: Setup, start: Checkpoint) -> Stepper:
    """A backend in the state of ``start``, its next learning rate, and the random generators as they were."""
    stepper = setup.stepper_at(cast(State, start.state), start.updates)
    generators.restore(start.generators, setup.device)
    return stepper


def describe(start: Checkpoint, resume: Path | None) -> dict[str, Any]:
    """``resumed_from`` in a record: where the checkpoint is, and what tells it from others."""
    return {
        "path": str(resume),
        "step": start.step,
        **{key: start.identity.get(key) for key in ("backend", "precision")},
        "weights": fingerprint(start.state["params"]),
    }
