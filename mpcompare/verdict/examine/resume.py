"""The pass ``resume``: a backend that loaded the state of another backend is compared with the other one, and its next
update with the optimizer's from this state."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpcompare.contract import Stepper, Walk
from mpcompare.instruments import heap
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.stored import Stored
from mpcompare.tasks.draws import EXAMINED, seed_step
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.errors import gradient_errors
from mpcompare.verdict.examine.idle import idle
from mpcompare.verdict.examine.new_step import compared, gradients_of
from mpcompare.verdict.examine.oracle import Exact
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.examine.trained import KeptStep, trained_update
from mpcompare.verdict.judge.drive import NextScale
from mpcompare.verdict.judge.resume import Reload


def resume(subject: Subject) -> Reload:
    """Lets a backend take two steps. A new backend loads the state between them and takes the second step. Returns the
    differences. The first backend is freed before the new one is made.

    A dynamic loss scale grows after two good steps here, so that its state, too, shows in the second step. The new
    backend is made with another scale.
    """
    scaling = subject.scaling.starting_at(subject.scaling.scale / 256)  # so that the first step does not overflow
    if isinstance(scaling, DynamicLossScale):
        scaling = replace(scaling, growth_interval=2)
    batch, rates = subject.first_batches[1], subject.task.new_rates()
    saved = subject.make_backend(subject.model, scaling)
    seed_step(EXAMINED)
    Stepper(saved, rates).step(subject.first_batch)
    updates, lr = int(not saved.skipped), float(rates.now)
    state, params = subject.shared.aside(saved.state_dict()), Stored(saved.master_params())
    walk = Walk(saved, batch, lr)
    loss, grads = gradients_of(walk)
    second = Exact(loss, Stored(grads))
    walk.finish()
    should_scale = float(saved.loss_scale())
    ends, buffers = map(numerics.spreads, (saved.master_params(), saved.buffers()))
    del saved, walk, grads
    if isinstance(scaling, DynamicLossScale):
        scaling = scaling.starting_at(4 * scaling.scale)
    heap.trim()
    loaded = subject.make_backend(subject.model, scaling)
    loaded.load_state_dict(state())
    lost = lost_entries({**state(), "params": params}, loaded.state_dict())
    walk = KeptStep(loaded, batch, lr, updates, 1)
    rule = subject.rule_of(loaded)
    loss, grads = gradients_of(walk, kept=rule.task.clip_norm is not None)
    gradients = compared(loss, grads, second)
    without = idle(subject.model, subject.task.loss_fn, batch, grads, params, state()["buffers"])
    update = trained_update(rule, walk, grads, without)
    return Reload(
        step=gradients,
        next_scale=NextScale(float(loaded.loss_scale()), should_scale),
        error=numerics.distance(ends, numerics.spreads(loaded.master_params())),
        norm=numerics.distance(numerics.spreads(params), ends),
        weights=numerics.finite_norm(ends),
        lost=lost,
        update=update,
        buffers=gradient_errors(numerics.spreads(loaded.buffers()), buffers),
    )


def lost_entries(state: Mapping[str, Any], loaded: Mapping[str, Any]) -> list[str]:
    """Returns the entries of a state that are not, or not bit for bit, in another: ``params``, ``buffers``,
    ``optimizer.momentum_buffer``, ``loss_scale.growth_tracker``."""

    def equal(tensors: Params, others: Params) -> bool:
        same = True
        for name, t in tensors.items():
            same = same and name in others and numerics.same_bits(t, others[name])
            heap.forget(t)  # the tensor may be mapped from a file
        return same

    def parts(of: Mapping[str, Any]) -> dict[str, Params]:
        kinds = {f"optimizer.{kind}": tensors for kind, tensors in of["optimizer"].items()}
        return {"params": of["params"], "buffers": of["buffers"], **kinds, "generators": of.get("generators", {})}

    others, scales = parts(loaded), state["loss_scale"].items()
    lost = [part for part, tensors in parts(state).items() if not equal(tensors, others.get(part, {}))]
    return [*lost, *(f"loss_scale.{name}" for name, value in scales if loaded["loss_scale"].get(name) != value)]
