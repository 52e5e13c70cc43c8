"""Known mistakes: updates that are not the optimizer's are held beside those that such a mistake makes.

A mistake is named only if it makes all updates of a tensor within the bounds of fp32, element by element, where the
optimizer does not: a guess that is a factor off in one of a thousand elements is none.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mpcompare.clipping import USUAL_NORMS, factor_of_norm
from mpcompare.tasks.optimizers import Adam, AdamReplay, AdamW, Optimizer, Replay, Sgd
from mpcompare.tasks.task import Params, Task
from mpcompare.verdict.examine.errors import FROM_THE_START, Remembered, update_error

ELEMENTS = 4096  # of a large tensor, evenly spread: every update is one of single elements


@dataclass(frozen=True)
class Update:
    """An update: of each tensor at most ``ELEMENTS`` elements, in one row.

    Attributes:
        before, after: the weights.
        grads: before they were clipped; of a backend whose step is one piece, after.
        clipped: as they are given to the optimizer.
        lr: as the schedule has it.
        norm: the 2-norm of ``clipped``, all elements of all tensors together; NaN where none are shown.
        number: the number of updates that were taken before.
        steps: the number of steps before, the skipped ones among them.
        remembered: the state that was loaded just before; of each tensor the same elements.
        scale: the loss scale of the step.
    """

    before: Params
    after: Params
    grads: Params
    clipped: Params
    lr: float
    norm: float
    number: int
    steps: int
    remembered: Remembered = FROM_THE_START
    scale: float = 1.0


def some_of(tensors: Mapping[str, Tensor]) -> Params:
    """Returns at most ``ELEMENTS`` of each tensor, copied."""
    return {name: t.flatten()[:: max(1, -(-t.numel() // ELEMENTS))].clone() for name, t in tensors.items()}


Mistake = Callable[[str, Update], tuple[Tensor, Tensor]]  # change and magnitude, as ``Replay.step`` returns them


def known_mistakes(
    task: Task,
    updates: Sequence[Update],
    compute_dtype: torch.dtype,
    others: Sequence[tuple[str, Optimizer, float]] = (),
) -> dict[str, float]:
    """Returns how far the updates are from each mistake: by its name the largest error over its bound, of any tensor
    that the optimizer does not make. Empty where the optimizer makes all.

    Args:
        others: more mistakes, each by its name as another optimizer and a factor of the learning rate; of several with
            one name the nearest counts.
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

    wrong = [name for name, worst in excess(_by(task.optimizer.replay())).items() if not worst <= 1]
    if not wrong:
        return {}
    errors = {}
    mistakes = list(_mistakes(task, compute_dtype))
    if task.schedule.length and all(update.number for update in updates):  # a wrong first update is no sign of it
        mistakes.append(("another rate", _at_another_rate(task.optimizer)))
    for name, mistake in mistakes:
        worst = excess(mistake)
        errors[name] = max(worst[tensor] for tensor in wrong)
    for name, other, factor in others:
        worst = excess(_by(other.replay(), partial(_times, factor)))
        errors[name] = min(errors.get(name, math.inf), max(worst[tensor] for tensor in wrong))
    return errors


def _by(
    replay: Replay,
    rate: Callable[[Update], float] | None = None,
    unclipped: bool = False,
    grad_of: Callable[[Tensor, Update], Tensor] | None = None,
    weight_dtype: torch.dtype | None = None,
) -> Mistake:
    """Returns the updates of a replay that sees another rate, other gradients, or other weights than the right one."""

    def mistake(name: str, update: Update) -> tuple[Tensor, Tensor]:
        g, w = (update.grads if unclipped else update.clipped)[name].double(), update.before[name]
        if grad_of:
            g = grad_of(g, update)
        if weight_dtype:
            w = w.to(weight_dtype)
        if isinstance(replay, CountsSteps):
            replay.steps = update.number if isinstance(replay, CountsUpdates) else update.steps
        if kept := update.remembered.of(name):
            loaded = {kind: tensor.double() for kind, tensor in kept.items()}
            replay.remember(name, loaded, update.remembered.updates, update.remembered.at_once)
        return replay.step(name, g, w.double(), rate(update) if rate else update.lr)

    return mistake


def _mistakes(task: Task, compute_dtype: torch.dtype) -> Iterator[tuple[str, Mistake]]:
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
            "schedule counts skipped steps": at(lambda update: update.steps),
            "schedule left out": lambda update: optimizer.lr,
        }
        if every > 1:
            rates["schedule counts micro-batches"] = at(lambda update: update.number * every)
        yield from ((name, _by(optimizer.replay(), rate)) for name, rate in rates.items())
    if task.clip_norm is not None:
        yield "not clipped", _by(optimizer.replay(), unclipped=True)
    else:
        yield from ((f"clipped to {norm:g}", _clipped(optimizer.replay(), norm)) for norm in USUAL_NORMS)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        yield f"lr in {name}", _by(optimizer.replay(), partial(_rounded_rate, dtype))
    if isinstance(optimizer, Sgd):
        yield from _sgd_mistakes(optimizer)
    if isinstance(optimizer, (Adam, AdamW)):
        yield from _adam_mistakes(optimizer)
    if decay := getattr(optimizer, "weight_decay", 0.0):
        base, without = optimizer.lr, replace(optimizer, weight_decay=0.0)  # type: ignore[type-var]
        yield "no decay", _by(without.replay())
        yield "decay of the 16-bit weights", _by(optimizer.replay(), weight_dtype=compute_dtype)
        yield "decay not times lr", _decayed(without.replay(), lambda update: decay)
        yield "decay at the first lr", _decayed(without.replay(), lambda update: base * decay)
        if isinstance(optimizer, AdamW):
            coupled = Adam(optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay)
            yield "decay in the gradient", _by(coupled.replay())
            yield "decay after the update", _decayed_after(without.replay(), decay)
            yield "bias correction in the rate", _corrected_rate(optimizer)
        else:
            yield "decay beside the gradient", _decayed(without.replay(), lambda update: update.lr * decay)
            yield "decay times the loss scale", _decayed_by(without.replay(), lambda update: decay * update.scale)
            yield "decay over the loss scale", _decayed_by(without.replay(), lambda update: decay / update.scale)


def _clipped(replay: Replay, norm: float) -> Mistake:
    """Clips to ``norm``, and allows for an fp32 norm, which is a sum of many squares."""
    clipped = _by(replay, grad_of=lambda g, update: g * factor_of_norm(update.norm, norm))

    def mistake(name: str, update: Update) -> tuple[Tensor, Tensor]:
        change, magnitude = clipped(name, update)
        return change, magnitude + 64 * change.abs()

    return mistake


def _times(factor: float, update: Update) -> float:
    return factor * update.lr


def _at_another_rate(optimizer: Optimizer) -> Mistake:
    """Multiplies each update by the one number that fits all of its tensors best: updates are linear in their rate."""
    plain, fitted = _by(optimizer.replay()), _by(optimizer.replay())
    factors: dict[int, float] = {}  # by the number of the update

    def fit(update: Update) -> float:
        product = square = 0.0
        for name in update.clipped:
            change, _ = fitted(name, update)
            moved = update.after[name].double() - update.before[name].double()
            product, square = product + torch.dot(moved, change).item(), square + change.square().sum().item()
        return product / square if square else 1.0

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
    plain = _by(replay)

    def decayed(name: str, update: Update) -> tuple[Tensor, Tensor]:
        change, magnitude = plain(name, update)
        w = update.before[name].double()
        return change - share(update) * w, magnitude + 2 * (1 + share(update)) * w.abs()

    return decayed


def _decayed_after(replay: Replay, decay: float) -> Mistake:
    """Multiplies the weight by ``1 - lr decay`` after an update without decay."""
    plain = _by(replay)

    def decayed(name: str, update: Update) -> tuple[Tensor, Tensor]:
        change, magnitude = plain(name, update)
        w, share = update.before[name].double(), update.lr * decay
        return change - share * (w + change), magnitude + 2 * (1 + share) * w.abs()

    return decayed


def _decayed_by(replay: Replay, decay: Callable[[Update], float]) -> Mistake:
    """Adds another decay to the gradient."""

    def decayed(name: str, update: Update) -> tuple[Tensor, Tensor]:
        added = decay(update) * update.before[name].double()
        return _by(replay, grad_of=lambda g, _: g + added)(name, update)

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
    yield "no momentum", _by(replace(optimizer, momentum=0.0, nesterov=False).replay())
    yield "the other momentum", _by(replace(optimizer, nesterov=not optimizer.nesterov).replay())
    kept = 1 - optimizer.momentum
    yield "momentum dampened", _by(optimizer.replay(), grad_of=lambda g, update: kept * g if update.number else g)
    yield "momentum a mean", _by(optimizer.replay(), grad_of=lambda g, update: kept * g)
    if not optimizer.weight_decay:  # v = momentum v + lr g; w = w - v
        by_rate = _by(optimizer.replay(), rate=lambda update: 1.0, grad_of=lambda g, update: update.lr * g)
        yield "lr in the momentum", by_rate


def _adam_mistakes(optimizer: Adam | AdamW) -> Iterator[tuple[str, Mistake]]:
    decoupled = isinstance(optimizer, AdamW)
    yield "eps inside the root", _by(EpsInside(optimizer, decoupled))
    yield "eps 0", _by(NoEps(optimizer, decoupled))
    yield "eps before the correction", _by(EpsBefore(optimizer, decoupled))
    yield "no bias correction", _by(NoCorrection(optimizer, decoupled))
    yield "no bias correction of m", _by(NoCorrectionOfM(optimizer, decoupled))
    yield "no bias correction of v", _by(NoCorrectionOfV(optimizer, decoupled))
    yield "bias correction counts skipped steps", _by(CountsSteps(optimizer, decoupled))
    yield "bias correction counts updates without a gradient", _by(CountsUpdates(optimizer, decoupled))
    yield "bias correction one update ahead", _by(OneAhead(optimizer, decoupled))
    yield "mean corrected in place", _by(CorrectedInPlace(optimizer, decoupled))
    yield "betas swapped", _by(replace(optimizer, betas=optimizer.betas[::-1]).replay())


class EpsInside(AdamReplay):
    """``sqrt(v + eps)``."""

    def denominator(self, v: Tensor, c2: float) -> Tensor:
        return (v + self.optimizer.eps).sqrt()


class NoEps(AdamReplay):
    """As where fp16 holds eps: 1e-8 is 0 there."""

    def denominator(self, v: Tensor, c2: float) -> Tensor:
        return v.sqrt()


class EpsBefore(AdamReplay):
    """``(sqrt(v) + eps) / sqrt(c2)``, with v as it is kept."""

    def denominator(self, v: Tensor, c2: float) -> Tensor:
        return v.sqrt() + self.optimizer.eps / c2**0.5


class NoCorrection(AdamReplay):
    def corrections(self, t: int) -> tuple[float, float]:
        return 1.0, 1.0


class NoCorrectionOfM(AdamReplay):
    def corrections(self, t: int) -> tuple[float, float]:
        return 1.0, super().corrections(t)[1]


class NoCorrectionOfV(AdamReplay):
    def corrections(self, t: int) -> tuple[float, float]:
        return super().corrections(t)[0], 1.0


class OneAhead(AdamReplay):
    def corrections(self, t: int) -> tuple[float, float]:
        return super().corrections(t + 1)


class CorrectedInPlace(AdamReplay):
    """The mean of the gradients is kept as it was corrected, and corrected again in the next update."""

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        update = super().step(name, grad, weight, lr)
        (m, M, *rest), (c1, _) = self.means[name], self.corrections(self.updates[name])
        self.means[name] = m / c1, M / c1, *rest
        return update


class CountsSteps(AdamReplay):
    """Skipped steps count as updates.

    Attributes:
        steps: that were taken before this one, set from outside.
    """

    steps = 0

    def corrections(self, t: int) -> tuple[float, float]:
        return super().corrections(self.steps + 1)


class CountsUpdates(CountsSteps):
    """Updates in which a parameter has no gradient count as its own."""
