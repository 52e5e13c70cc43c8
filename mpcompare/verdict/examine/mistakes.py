"""The known mistakes of any optimizer, of SGD, and of weight decay. The mistakes of Adam are in adam_mistakes.py."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcompare.clipping import USUAL_NORMS, factor_of_norm
from mpcompare.tasks.optimizers import Adam, AdamW, Optimizer, Sgd, UpdateReplay
from mpcompare.tasks.task import Task
from mpcompare.verdict.examine.adam_mistakes import adam_mistakes, eps_before
from mpcompare.verdict.examine.errors import UNIT_ROUNDOFF
from mpcompare.verdict.examine.seen import Known, Mistake, Seen, by

DECOUPLED = "with the decay outside of the gradient, as AdamW has it"


def mistakes(task: Task, compute_dtype: torch.dtype) -> Iterator[Known]:
    """Yields the likelier mistakes first: where two mistakes make the same updates, the first is named."""
    optimizer = task.optimizer
    yield from _of_schedule(task)
    if task.clip_norm is not None:
        yield Known("clip", "from gradients that are not clipped", by(optimizer.replay(), unclipped=True))
    else:
        for norm in USUAL_NORMS:
            made = f"from gradients that are clipped to a norm of {norm:g}, as nobody asked for"
            yield Known("clip", made, _clipped(optimizer, norm))
    divided = by(optimizer.replay(), grad_of=lambda g, w, update: g / update.scale)
    yield Known("gradient scaled", "from gradients that are divided by the loss scale once more", divided)
    multiplied = by(optimizer.replay(), grad_of=lambda g, w, update: g * update.scale)
    yield Known("gradient scaled", "from gradients that are multiplied by the loss scale", multiplied)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        rounded = by(optimizer.replay(), partial(_rounded_rate, dtype))
        yield Known("optimizer", f"at a learning rate that is rounded to {name}", rounded)
    if isinstance(optimizer, Sgd) and optimizer.momentum:
        yield from (Known("momentum", made, mistake) for made, mistake in _of_momentum(optimizer))
    if isinstance(optimizer, (Adam, AdamW)):
        yield from adam_mistakes(optimizer)
    if getattr(optimizer, "weight_decay", 0.0):
        yield from (Known("weight decay", made, mistake) for made, mistake in _of_decay(optimizer, compute_dtype))
    if isinstance(optimizer, AdamW) and optimizer.weight_decay:
        made = "with the bias correction in the learning rate, which the decay is multiplied by, too"
        yield Known("bias correction", made, _corrected_rate(optimizer))


def _of_schedule(task: Task) -> Iterator[Known]:
    optimizer, schedule, every = task.optimizer, task.schedule, task.accumulate
    if not schedule.length:
        return

    def at(count: Callable[[Seen], int]) -> Callable[[Seen], float]:
        return lambda update: optimizer.lr * schedule.factor(max(count(update), 0))

    late = at(lambda update: update.number - 1)
    rates = {
        "at the learning rate of the update before": late,
        "at the learning rate of the update before, and the first one at 0": (
            lambda update: late(update) if update.number else 0.0
        ),
        "at the learning rate of the next update": at(lambda update: update.number + 1),
        "at the learning rate of the first update": at(lambda update: 0),
        "at a learning rate that skipped steps advance, too": at(lambda update: update.steps),
        "at the optimizer's learning rate, whatever the schedule": lambda update: optimizer.lr,
    }
    if every > 1:
        rates["at a learning rate that every micro-batch advances"] = at(lambda update: update.number * every)
    yield from (Known("schedule", made, by(optimizer.replay(), rate)) for made, rate in rates.items())


def at_another_rate(optimizer: Optimizer) -> Known:
    """Returns the mistake that multiplies each update by the number that fits all of its tensors best: updates are
    linear in their rate. An update that is left out has no rate."""
    plain, fitted = by(optimizer.replay()), by(optimizer.replay())
    factors: dict[int, float] = {}  # by the number of the update

    def fit(update: Seen) -> float:
        product = square = 0.0
        for name in update.clipped:
            change, _ = fitted(name, update)
            moved = update.after[name].double() - update.before[name].double()
            product, square = product + torch.dot(moved, change).item(), square + change.square().sum().item()
        return product / square if product and square else 1.0  # a rate of 0 moves nothing

    def mistake(name: str, update: Seen) -> tuple[Tensor, Tensor]:
        if update.number not in factors:
            factors[update.number] = fit(update)
        factor, (change, magnitude) = factors[update.number], plain(name, update)
        return factor * change, max(1.0, abs(factor)) * magnitude

    return Known("schedule", "at another learning rate than that of the schedule, right apart from that", mistake)


def _clipped(optimizer: Optimizer, norm: float) -> Mistake:
    """Clips to ``norm``, and allows for the change that 64 roundings of the norm make: in fp32 the norm is a sum of
    many squares."""

    def by_factor(off: float) -> Mistake:
        return by(
            optimizer.replay(), grad_of=lambda g, w, update: g * (off * factor_of_norm(update.clipped_norm, norm))
        )

    exact, rounded = by_factor(1.0), by_factor(1.0 + 64 * UNIT_ROUNDOFF)

    def mistake(name: str, update: Seen) -> tuple[Tensor, Tensor]:
        (change, magnitude), (other, _) = exact(name, update), rounded(name, update)
        return change, magnitude + (other - change).abs() / UNIT_ROUNDOFF

    return mistake


def _rounded_rate(dtype: torch.dtype, update: Seen) -> float:
    return torch.tensor(update.lr, dtype=dtype).item()


def _of_momentum(optimizer: Sgd) -> Iterator[tuple[str, Mistake]]:
    kept = 1 - optimizer.momentum
    yield "without momentum", by(replace(optimizer, momentum=0.0, nesterov=False).replay())
    other = replace(optimizer, nesterov=not optimizer.nesterov)
    yield "with Nesterov's momentum where it is not asked for, or the reverse", by(other.replay())
    dampened = by(optimizer.replay(), grad_of=lambda g, w, update: kept * g if update.number else g)
    yield "with gradients times 1 - momentum, but for the first", dampened
    yield "with gradients times 1 - momentum", by(optimizer.replay(), grad_of=lambda g, w, update: kept * g)
    if not optimizer.weight_decay:  # v = momentum v + lr g; w = w - v
        by_rate = by(optimizer.replay(), rate=lambda update: 1.0, grad_of=lambda g, w, update: update.lr * g)
        yield "with the learning rate in the momentum, where a schedule changes it too late", by_rate


def _of_decay(optimizer: Any, compute_dtype: torch.dtype) -> Iterator[tuple[str, Mistake]]:
    base, decay, without = optimizer.lr, optimizer.weight_decay, replace(optimizer, weight_decay=0.0)
    yield "without weight decay", by(without.replay())
    yield "with a decay of the 16-bit weights", by(optimizer.replay(), weight_dtype=compute_dtype)
    yield "with a decay that is not multiplied by the learning rate", _decayed(without.replay(), lambda update: decay)
    at_first = _decayed(without.replay(), lambda update: base * decay)
    yield "with a decay at the optimizer's learning rate, whatever the schedule", at_first
    by_the_rate = partial(_decayed, without.replay(), lambda update: update.lr * decay)
    if isinstance(optimizer, AdamW):
        coupled = Adam(optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay)
        yield "with the decay in the gradient, as Adam has it", by(coupled.replay())
        yield "with a decay of the weight that is already updated", by_the_rate(of_new=True)
        return
    yield DECOUPLED, by_the_rate()
    scaled = by(without.replay(), grad_of=lambda g, w, update: g + decay * update.scale * w)
    yield "with a decay that is multiplied by the loss scale", scaled
    divided = by(without.replay(), grad_of=lambda g, w, update: g + decay / update.scale * w)
    yield "with a decay that is divided by the loss scale", divided


def _decayed(replay: UpdateReplay, share: Callable[[Seen], float], of_new: bool = False) -> Mistake:
    """Multiplies the weight by ``1 - share`` before an update without decay, or after it. It is rounded as in AdamW."""
    plain = by(replay)

    def decayed(name: str, update: Seen) -> tuple[Tensor, Tensor]:
        change, magnitude = plain(name, update)
        w, part = update.before[name].double(), share(update)
        return change - part * (w + change if of_new else w), magnitude + 2 * (1 + part) * w.abs()

    return decayed


def _corrected_rate(optimizer: AdamW) -> Mistake:
    """``w -= lr sqrt(c2) / c1 (m / (sqrt(v) + eps) + weight_decay w)``."""
    beta1, beta2 = optimizer.betas

    def share(update: Seen) -> float:
        t = max(update.remembered.updates, update.number) + 1
        return update.lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * optimizer.weight_decay

    return _decayed(eps_before(replace(optimizer, weight_decay=0.0)), share)
