"""The pass ``aged``: a new backend loads a state as it is after long training, one good step before the loss scale
grows."""

from collections.abc import Callable

import torch

from mpcompare.contract import State
from mpcompare.dtypes import dtype_name
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.verdict.examine.drive import Driver
from mpcompare.verdict.examine.oracle import Exact
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.judge.aged import Aged
from mpcompare.verdict.judge.counts import Count

# The least number of updates after which no 16-bit format holds one more: fp16 has 11 digits, bf16 has 8.
UPDATES = 2**11


def age_of(young: Driver) -> tuple[Callable[[State], State], Exact | None] | None:
    """Returns a function that makes an old state, as after long training, of the state of a new backend; and the first
    step of the young backend at the same loss scale, None where it overflows. Returns None where nothing that the
    backend remembers ages.

    The moments are the present ones, and the optimizer counts ``UPDATES``. The loss scale is the first one whose
    gradients were finite. It has had one good step less than it needs to grow. ``young`` has driven the pass ``first``.
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
    kept_aside = young.subject.shared.aside(optimizer)

    def old(new: State) -> State:
        return {**new, "optimizer": kept_aside(), "loss_scale": {**new["loss_scale"], **loss_scale}}

    return old, young.first_step


def aged(subject: Subject, old: Callable[[State], State], young: Exact | None) -> Aged:
    """Takes a step of the first batch at the initial weights."""
    driver = Driver(subject, subject.scaling, new=young)
    driver.load(state := old(driver.backend.state_dict()))
    counted = set(state["optimizer"].get("step", {}))
    del state
    driver.take(subject.first_batch)

    def should_count(name: str) -> int:
        """The count begins at 0 if the loaded state had none, and goes on with each gradient."""
        return UPDATES * (name in counted) + sum(name not in without for without in driver.found.idle)

    counts = {
        name: Count(float(count), should_count(name), dtype_name(count.dtype))
        for name, count in driver.backend.state_dict()["optimizer"].get("step", {}).items()
    }
    return Aged(driver.result(), isinstance(subject.scaling, DynamicLossScale), counts)
