"""Known mistakes: updates that are not the optimizer's are held beside those that such a mistake makes.

A mistake is named only if it makes all updates of a tensor within the bounds of fp32, element by element, where the
optimizer does not: a guess that is a factor off in one of a thousand elements is none.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mpcompare.clipping import USUAL_NORMS, factor_of_norm
from mpcompare.tasks.optimizers import Adam, AdamW, Optimizer, Replay, Sgd
from mpcompare.tasks.task import Task
from mpcompare.verdict.examine.adam_mistakes import EpsBefore, adam_mistakes
from mpcompare.verdict.examine.errors import UNIT_ROUNDOFF, update_error
from mpcompare.verdict.examine.updates import Mistake, Update, by


def known_mistakes(
    task: Task, updates: Sequence[Update], compute_dtype: torch.dtype, others: Iterable[tuple[str, Mistake]] = ()
) -> dict[str, float]:
    """Returns how far the updates are from each mistake: by its name the largest error over its bound, of any tensor
    that the optimizer does not make; of several mistakes with one name the nearest counts. Empty where the optimizer
    makes all.

    Args:
        others: more mistakes, each with its name.
    """

    def excess(mistake: Mistake) -> dict[str, float]:
        worst: dict[str, float] = {}
        for update in updates:
            for name in update.clipped:
                change, magnitude = mistake(name, update)
                tensors = (update.before[name], update.after[name], change, magnitude)
                said = ~(update.after[name].isnan() & change.isnan())  # 0 / 0 on both sides is the same
                error = update_error(*(t[said] for t in tensors)) if said.any() else 0.0
                worst[name] = max(worst.get(name, 0.0), error)
        return worst

    wrong = [name for name, worst in excess(by(task.optimizer.replay())).items() if not worst <= 1]
    if not wrong:
        return {}
    errors: dict[str, float] = {}
    candidates = [*mistakes(task, compute_dtype), *others]
    if task.schedule.length and all(update.number for update in updates):  # a wrong first update is no sign of it
        candidates.append(("another rate", _at_another_rate(task.optimizer)))
    for name, mistake in candidates:
        worst = excess(mistake)
        errors[name] = min(errors.get(name, math.inf), max(worst[tensor] for tensor in wrong))
    return errors


def mistakes(task: Task, compute_dtype: torch.dtype) -> Iterator[tuple[str, Mistake]]:
    """Yields the likelier ones first: where two make the same updates, the first is named."""
    optimizer, schedule, every = task.optimizer, task.schedule, task.accumulate

    def at(count: Callable[[Update], int]) -> Callable[[Update], float]:
        return lambda update: optimizer.lr * schedule.factor(max(count(update), 0))

    if schedule.length:
        late = at(lambda update: update.number - 1)
        rates = {
            "schedule late": late,
            "schedule late from 0": lambda update: late(update) if update.number else 0.0,
            "schedule early": at(lambda update: update.number + 1),
            "schedule of the first update": at(lambda update: 0),
            "schedule counts skipped steps": at(lambda update: update.steps),
            "schedule left out": lambda update: optimizer.lr,
        }
        if every > 1:
            rates["schedule counts micro-batches"] = at(lambda update: update.number * every)
        yield from ((name, by(optimizer.replay(), rate)) for name, rate in rates.items())
    if task.clip_norm is not None:
        yield "not clipped", by(optimizer.replay(), unclipped=True)
    else:
        yield from ((f"clipped to {norm:g}", _clipped(optimizer, norm)) for norm in USUAL_NORMS)
    yield "gradients over the loss scale", by(optimizer.replay(), grad_of=lambda g, update: g / update.scale)
    yield "gradients times the loss scale", by(optimizer.replay(), grad_of=lambda g, update: g * update.scale)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        yield f"lr in {name}", by(optimizer.replay(), partial(_rounded_rate, dtype))
    if isinstance(optimizer, Sgd):
        yield from _sgd_mistakes(optimizer)
    if isinstance(optimizer, (Adam, AdamW)):
        yield from adam_mistakes(optimizer)
    if decay := getattr(optimizer, "weight_decay", 0.0):
        base, without = optimizer.lr, replace(optimizer, weight_decay=0.0)  # type: ignore[type-var]
        yield "no decay", by(without.replay())
        yield "decay of the 16-bit weights", by(optimizer.replay(), weight_dtype=compute_dtype)
        yield "decay not times lr", _decayed(without.replay(), lambda update: decay)
        yield "decay at the first lr", _decayed(without.replay(), lambda update: base * decay)
        if isinstance(optimizer, AdamW):
            coupled = Adam(optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay)
            yield "decay in the gradient", by(coupled.replay())
            yield "decay after the update", _decayed_after(without.replay(), decay)
            yield "bias correction in the rate", _corrected_rate(optimizer)
        else:
            yield "decay beside the gradient", _decayed(without.replay(), lambda update: update.lr * decay)
            yield "decay times the loss scale", _decayed_by(without.replay(), lambda update: decay * update.scale)
            yield "decay over the loss scale", _decayed_by(without.replay(), lambda update: decay / update.scale)


def _clipped(optimizer: Optimizer, norm: float) -> Mistake:
    """Clips to ``norm``, and allows for the change that 64 roundings of the norm make: in fp32 it is a sum of many
    squares."""

    def by_factor(off: float) -> Mistake:
        return by(optimizer.replay(), grad_of=lambda g, update: g * (off * factor_of_norm(update.norm, norm)))

    exact, rounded = by_factor(1.0), by_factor(1.0 + 64 * UNIT_ROUNDOFF)

    def mistake(name: str, update: Update) -> tuple[Tensor, Tensor]:
        (change, magnitude), (other, _) = exact(name, update), rounded(name, update)
        return change, magnitude + (other - change).abs() / UNIT_ROUNDOFF

    return mistake


def _at_another_rate(optimizer: Optimizer) -> Mistake:
    """Multiplies each update by the one number that fits all of its tensors best: updates are linear in their rate.
    An update that is left out has no rate."""
    plain, fitted = by(optimizer.replay()), by(optimizer.replay())
    factors: dict[int, float] = {}  # by the number of the update

    def fit(update: Update) -> float:
        product = square = 0.0
        for name in update.clipped:
            change, _ = fitted(name, update)
            moved = update.after[name].double() - update.before[name].double()
            product, square = product + torch.dot(moved, change).item(), square + change.square().sum().item()
        return product / square if product and square else 1.0  # a rate of 0 moves nothing

    def mistake(name: str, update: Update) -> tuple[Tensor, Tensor]:
        if update.number not in factors:
            factors[update.number] = fit(update)
        factor, (change, magnitude) = factors[update.number], plain(name, update)
        return factor * change, max(1.0, abs(factor)) * magnitude

    return mistake


def _rounded_rate(dtype: torch.dtype, update: Update) -> float:
    return torch.tensor(update.lr, dtype=dtype).item()


def _decayed(replay: Replay, share: Callable[[Update], float]) -> Mistake:
    """Multiplies the weight by ``1 - share`` before an update without decay; rounded as AdamW's."""
    plain = by(replay)

    def decayed(name: str, update: Update) -> tuple[Tensor, Tensor]:
        change, magnitude = plain(name, update)
        w = update.before[name].double()
        return change - share(update) * w, magnitude + 2 * (1 + share(update)) * w.abs()

    return decayed


def _decayed_after(replay: Replay, decay: float) -> Mistake:
    """Multiplies the weight by ``1 - lr decay`` after an update without decay."""
    plain = by(replay)

    def decayed(name: str, update: Update) -> tuple[Tensor, Tensor]:
        change, magnitude = plain(name, update)
        w, share = update.before[name].double(), update.lr * decay
        return change - share * (w + change), magnitude + 2 * (1 + share) * w.abs()

    return decayed


def _decayed_by(replay: Replay, decay: Callable[[Update], float]) -> Mistake:
    """Adds another decay to the gradient."""

    def decayed(name: str, update: Update) -> tuple[Tensor, Tensor]:
        added = decay(update) * update.before[name].double()
        return by(replay, grad_of=lambda g, _: g + added)(name, update)

    return decayed


def _corrected_rate(optimizer: AdamW) -> Mistake:
    """``w -= lr sqrt(c2) / c1 (m / (sqrt(v) + eps) + weight_decay w)``."""
    beta1, beta2 = optimizer.betas

    def share(update: Update) -> float:
        t = max(update.remembered.updates, update.number) + 1
        return update.lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * optimizer.weight_decay

    return _decayed(EpsBefore(replace(optimizer, weight_decay=0.0), True), share)


def _sgd_mistakes(optimizer: Sgd) -> Iterator[tuple[str, Mistake]]:
    if not optimizer.momentum:
        return
    yield "no momentum", by(replace(optimizer, momentum=0.0, nesterov=False).replay())
    yield "the other momentum", by(replace(optimizer, nesterov=not optimizer.nesterov).replay())
    kept = 1 - optimizer.momentum
    yield "momentum dampened", by(optimizer.replay(), grad_of=lambda g, update: kept * g if update.number else g)
    yield "momentum a mean", by(optimizer.replay(), grad_of=lambda g, update: kept * g)
    if not optimizer.weight_decay:  # v = momentum v + lr g; w = w - v
        by_rate = by(optimizer.replay(), rate=lambda update: 1.0, grad_of=lambda g, update: update.lr * g)
        yield "lr in the momentum", by_rate
