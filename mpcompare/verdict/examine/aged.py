"""The pass ``aged``: a new backend loads a state as it is after long training, one good step before the loss scale
grows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mpcompare.contract import State
from mpcompare.dtypes import dtype_name
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.drive import Driver
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.judge.aged import Aged
from mpcompare.verdict.judge.counts import Count

# The least number of updates after which no 16-bit format holds one more: fp16 has 11 digits, bf16 has 8.
UPDATES = 2**11


@dataclass(frozen=True)
class Age:
    """The state of a backend after long training."""

    optimizer: Callable[[], dict[str, Params]]  # makes everything that the optimizer remembers
    loss_scale: dict[str, float]  # the entries of the loss scale's state that differ from the start


def age_of(young: Driver) -> Age | None:
    """Returns what a backend would have after long training; None where it remembers nothing that ages.

    The moments are the present ones, and the optimizer counts ``UPDATES``. The loss scale is the first one whose
    gradients were finite. It has had one good step less than it needs to grow.

    Args:
        young: the driver of the pass ``first``, after its steps.
    """
    kept = young.backend.state_dict()["optimizer"]
    scaling = young.policy.scaling
    if not isinstance(scaling, DynamicLossScale) and "step" not in kept:
        return None
    known = young.subject.task.optimizer.initial_state(torch.zeros(()))
    # A backend that remembers something else under names of its own begins anew: no replay could follow it.
    optimizer = dict(kept) if set(known) <= set(kept) else {}
    if "step" in optimizer:
        optimizer["step"] = {name: torch.full_like(count, UPDATES) for name, count in optimizer["step"].items()}
    loss_scale = {}
    if isinstance(scaling, DynamicLossScale):
        good = next((step.loss_scale for step in young.found.steps if step.finite), scaling.scale)
        loss_scale = {"scale": good, "growth_tracker": scaling.growth_interval - 1}
    return Age(young.subject.shared.aside(optimizer), loss_scale)


def aged(subject: Subject, age: Age) -> Aged:
    """Takes a step of the first batch at the initial weights."""
    driver, optimizer = Driver(subject, subject.scaling), age.optimizer()
    state: State = driver.backend.state_dict()
    driver.load({**state, "optimizer": optimizer, "loss_scale": {**state["loss_scale"], **age.loss_scale}})
    counted = set(optimizer.get("step", {}))
    del state, optimizer
    driver.take(subject.first_batch)

    def should_count(name: str) -> int:
        """The count begins at 0 if the loaded state had none, and goes on with each gradient."""
        return UPDATES * (name in counted) + sum(name not in without for without in driver.found.idle)

    counts = {
        name: Count(float(count), should_count(name), dtype_name(count.dtype))
        for name, count in driver.backend.state_dict()["optimizer"].get("step", {}).items()
    }
    return Aged(driver.result(), bool(age.loss_scale), counts)
