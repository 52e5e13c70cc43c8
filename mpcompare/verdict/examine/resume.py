"""The pass ``resume``: a backend that loaded the state of another backend is compared with the other one, and its next
update with the optimizer's from this state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpcompare.contract import State, Stepper, Walk
from mpcompare.instruments import heap
from mpcompare.loss_scale import DynamicLossScale, LossScale
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


@dataclass(frozen=True)
class _Taken:
    """Two steps of a backend."""

    state: Callable[[], State]  # makes the state between the two steps, a new copy each time
    params: Stored  # the parameters between the two steps
    step: Exact  # loss and gradients of the second step
    loss_scale: float  # the loss scale after the second step
    # ends, buffers: some elements of parameters, and of buffers, after the second step
    ends: Params
    buffers: Params
    updates: int  # 1 if the first step was an update, else 0
    lr: float  # the learning rate of the second step


def resume(subject: Subject) -> Reload:
    """Lets a backend take two steps. A new backend loads the state between them and takes the second step. Returns the
    differences. The first backend is freed before the new one is made.

    A dynamic loss scale grows after two good steps here, so that its state, too, shows in the second step. The new
    backend is made with another scale.
    """
    scaling = subject.scaling.starting_at(subject.scaling.scale / 256)  # so that the first step does not overflow
    if isinstance(scaling, DynamicLossScale):
        scaling = replace(scaling, growth_interval=2)
    first, batch = _two_steps(subject, scaling), subject.first_batches[1]
    if isinstance(scaling, DynamicLossScale):
        scaling = scaling.starting_at(4 * scaling.scale)
    heap.trim()
    loaded = subject.make_backend(subject.model, scaling)
    loaded.load_state_dict(first.state())
    lost = lost_entries({**first.state(), "params": first.params}, loaded.state_dict())
    walk = KeptStep(loaded, batch, first.lr, first.updates, 1)
    rule = subject.rule_of(loaded)
    loss, grads = gradients_of(walk, kept=rule.task.clip_norm is not None)
    gradients = compared(loss, grads, first.step)
    without = idle(subject.model, subject.task.loss_fn, batch, grads, first.params, first.state()["buffers"])
    update = trained_update(rule, walk, grads, without)
    return Reload(
        step=gradients,
        next_scale=NextScale(float(loaded.loss_scale()), first.loss_scale),
        error=numerics.distance(first.ends, numerics.spreads(loaded.master_params())),
        norm=numerics.distance(numerics.spreads(first.params), first.ends),
        weights=numerics.finite_norm(first.ends),
        lost=lost,
        update=update,
        buffers=gradient_errors(numerics.spreads(loaded.buffers()), first.buffers),
    )


def _two_steps(subject: Subject, scaling: LossScale) -> _Taken:
    backend, rates = subject.make_backend(subject.model, scaling), subject.task.new_rates()
    seed_step(EXAMINED)
    Stepper(backend, rates).step(subject.first_batch)
    updates, lr = int(not backend.skipped), float(rates.now)
    state = subject.shared.aside(backend.state_dict())
    params = Stored(backend.master_params())
    walk = Walk(backend, subject.first_batches[1], lr)
    loss, grads = gradients_of(walk)
    step = Exact(loss, Stored(grads))
    walk.finish()
    ends, buffers = map(numerics.spreads, (backend.master_params(), backend.buffers()))
    return _Taken(state, params, step, float(backend.loss_scale()), ends, buffers, updates, lr)


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
