"""The pass ``aged``: a new backend that loads a state as it is after long training, one good step before the loss scale
grows."""

import copy

import torch

from mpcompare.contract import Batches, State
from mpcompare.dtypes import dtype_name
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.verdict.examine.drive import Driver
from mpcompare.verdict.examine.oracle import Exact
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import Aged, Count

# The least number of updates after which no 16-bit format holds one more: fp16 has 11 digits, bf16 has 8.
UPDATES = 2**11


def aged(subject: Subject, young: Driver, batch: Batches, exact: Exact) -> Aged | None:
    """Takes a step of the first batch at the initial weights, so that gradients are held beside the same oracle.

    The moments are those that the backend had after the pass ``first``; the optimizer counts ``UPDATES``, and the loss
    scale, which is the one whose gradients were finite there, has had one good step less than it needs to grow. None
    where a state has neither.

    Args:
        young: the driver of the pass ``first``, after its steps.
        batch: the first one.
        exact: the oracle's step on it.
    """
    grows = isinstance(young.scaling, DynamicLossScale)
    if not grows and "step" not in young.backend.state_dict()["optimizer"]:
        return None
    driver = Driver(subject, subject.scaling, batch, exact)
    driver.load(_aged_state(young, driver))
    driver.take(batch)
    found = driver.backend.state_dict()["optimizer"].get("step", {})
    counts = {
        name: Count(float(count), _should_count(name, driver), dtype_name(count.dtype)) for name, count in found.items()
    }
    return Aged(driver.result(), grows, counts)


def _should_count(name: str, driver: Driver) -> int:
    """Returns the number of updates that the optimizer counts of a parameter after the step: it begins at 0 where the
    state that was loaded had none of it, and an update without a gradient of it does not count."""
    before = UPDATES if name in driver.counted else 0
    return before + sum(name not in without for without in driver.idle)


def _aged_state(young: Driver, new: Driver) -> State:
    """Returns the state of a new backend with an aged optimizer and an aged loss scale."""
    state: State = new.backend.state_dict()
    kept = young.backend.state_dict()["optimizer"]
    known = young.task.optimizer.initial_state(torch.zeros(()))
    # A backend that remembers something else under names of its own begins anew: no replay could follow it.
    optimizer = copy.deepcopy(kept) if set(known) <= set(kept) else {}
    if "step" in optimizer:
        optimizer["step"] = {name: torch.full_like(count, UPDATES) for name, count in optimizer["step"].items()}
    scale = dict(state["loss_scale"])
    if isinstance(young.scaling, DynamicLossScale):
        good = next((step.loss_scale for step in young.taken if step.finite), young.scaling.scale)
        scale.update(scale=good, growth_tracker=young.scaling.growth_interval - 1)
    return {**state, "optimizer": optimizer, "loss_scale": scale}
