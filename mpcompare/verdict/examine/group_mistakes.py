"""Known mistakes of optimizers with parameter groups: those of each group, and those of taking one for another."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mpcompare.tasks.groups import in_group
from mpcompare.tasks.task import Task
from mpcompare.verdict.examine import known_mistakes as of_one_group
from mpcompare.verdict.examine.updates import Mistake, Update, by

Values = tuple[Any, float]  # the optimizer of a group, and the factor of its learning rate


def known_mistakes(task: Task, updates: Sequence[Update], compute_dtype: torch.dtype) -> dict[str, float]:
    """Returns ``known_mistakes`` of all tensors, whose optimizer may have groups. A mistake of several groups is one
    that each of them can have, and is as far from the updates as it is in any group."""
    groups: dict[Values, list[str]] = {}
    for name in dict.fromkeys(name for update in updates for name in update.clipped):
        groups.setdefault(in_group(task.optimizer, name, 0), []).append(name)
    if not getattr(task.optimizer, "groups", ()):
        return of_one_group.known_mistakes(task, updates, compute_dtype)
    found = []
    for (optimizer, factor), names in groups.items():
        own = [_of_group(update, names, factor) for update in updates]
        others = [*_mistaken_for(task.optimizer, (optimizer, factor), groups)]
        if factor != 1:  # schedules at the group's own rate; without that, at the rate of all
            at_its_rate = replace(task, optimizer=replace(optimizer, lr=factor * optimizer.lr))
            others += of_one_group.mistakes(at_its_rate, compute_dtype)
        errors = of_one_group.known_mistakes(replace(task, optimizer=optimizer), own, compute_dtype, others)
        if errors:
            found.append(errors)
    shared = [mistake for mistake in found[0] if all(mistake in errors for errors in found)] if found else []
    return {mistake: max(errors[mistake] for errors in found) for mistake in shared}


def _of_group(update: Update, names: Sequence[str], factor: float) -> Update:
    """Returns an update of some parameters, at their learning rate."""
    clipped = {name: update.clipped[name] for name in names if name in update.clipped}
    return replace(update, clipped=clipped, lr=factor * update.lr)


def _mistaken_for(optimizer: Any, own: Values, groups: Iterable[Values]) -> Iterator[tuple[str, Mistake]]:
    """Yields the mistakes of updating a group as if it were none, or another."""
    (of_group, factor), plain = own, replace(optimizer, groups=())
    yield "decay of no group", by(replace(of_group, weight_decay=plain.weight_decay).replay())
    yield "rate of no group", by(of_group.replay(), lambda update: update.lr / factor)
    yield "groups left out", by(plain.replay(), lambda update: update.lr / factor)
    for other in groups:
        if other != own:
            yield "values of another group", by(other[0].replay(), partial(_at, other[1] / factor))


def _at(factor: float, update: Update) -> float:
    return factor * update.lr
