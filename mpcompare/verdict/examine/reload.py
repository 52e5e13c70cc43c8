"""The pass ``reload``: a backend that loaded the state of another, beside that other, and its next update beside the
optimizer's from that state."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpcompare.contract import Batches, Stepper, Walk, take_step
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.tasks.draws import EXAMINED, seed_step
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.idle import idle
from mpcompare.verdict.examine.subject import Subject, at_scale
from mpcompare.verdict.examine.trained import gradients_of, start_of, trained_update
from mpcompare.verdict.findings import AfterLoad, Reload, ReloadedTensor


def reload(subject: Subject, batches: Sequence[Batches]) -> Reload:
    """Lets a backend take a step and a new one load its state, lets both take another, and returns the differences.

    A dynamic loss scale grows after two good steps here, so that its state, too, shows in the second; and the new
    backend is made with another scale.
    """
    scaling = at_scale(subject.scaling, subject.scaling.scale / 256)  # so that the first step does not overflow
    if isinstance(scaling, DynamicLossScale):
        scaling = replace(scaling, growth_interval=2)
    first, rates = subject.make_backend(subject.model, scaling), subject.task.new_rates()
    seed_step(EXAMINED)
    Stepper(first, rates).step(batches[0])
    updates = int(not first.skipped)
    if isinstance(scaling, DynamicLossScale):
        scaling = at_scale(scaling, 4 * scaling.scale)
    loaded = subject.make_backend(subject.model, scaling)
    state = first.state_dict()
    loaded.load_state_dict(copy.deepcopy(state))
    lost = lost_entries({**state, "params": first.master_params()}, loaded.state_dict())
    start = {name: p.detach().clone() for name, p in first.master_params().items()}
    seed_step(EXAMINED)  # for a network that draws masks, and a backend that rounds at random
    loss, lr = float(take_step(first, batches[1], rates.now)), float(rates.now)
    begin, walk = start_of(loaded, lr, updates, 1), Walk(loaded, batches[1], lr)
    again, grads = gradients_of(walk, kept=subject.task.clip_norm is not None)
    without = idle(subject.model, subject.task.loss_fn, batches[1], grads, start)
    update = trained_update(subject, walk, begin, grads, without)
    ends = [{**backend.master_params(), **backend.buffers()} for backend in (first, loaded)]
    return Reload(
        expected=AfterLoad(loss, float(first.loss_scale())),
        found=AfterLoad(again, float(loaded.loss_scale())),
        error=numerics.distance(*ends),
        norm=numerics.distance(start, ends[0]),
        weights=numerics.finite_norm(ends[0]),
        lost=lost,
        tensors={name: ReloadedTensor(_distance(ends, name), _distance((start, ends[0]), name)) for name in start},
        update=update,
    )


def _distance(pair: Sequence[Params], name: str) -> float:
    """Returns how far one tensor is apart in two states."""
    one, other = pair
    return numerics.distance({name: one[name]}, {name: other[name]})


def lost_entries(state: Mapping[str, Any], loaded: Mapping[str, Any]) -> list[str]:
    """Returns the entries of a state that are not, or not bit for bit, in another: ``params``, ``buffers``,
    ``optimizer.momentum_buffer``, ``loss_scale.growth_tracker``."""

    def equal(tensors: Params, others: Params) -> bool:
        return all(name in others and numerics.same_bits(t, others[name]) for name, t in tensors.items())

    lost = [part for part in ("params", "buffers") if not equal(state[part], loaded[part])]
    lost += [
        f"optimizer.{kind}"
        for kind, tensors in state["optimizer"].items()
        if not equal(tensors, loaded["optimizer"].get(kind, {}))
    ]
    if not equal(state.get("generators", {}), loaded.get("generators", {})):
        lost.append("generators")
    scales = state["loss_scale"].items()
    return [*lost, *(f"loss_scale.{name}" for name, value in scales if loaded["loss_scale"].get(name) != value)]
