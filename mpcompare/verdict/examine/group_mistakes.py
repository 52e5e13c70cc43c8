"""Known mistakes of optimizers with parameter groups: those of each group, and those of taking one for another."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mpcompare.tasks.groups import in_group
from mpcompare.tasks.task import Task
from mpcompare.verdict.examine import known_mistakes as of_one_group
from mpcompare.verdict.examine.known_mistakes import Update

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
        others = list(_mistaken_for(task.optimizer, (optimizer, factor), groups))
        errors = of_one_group.known_mistakes(replace(task, optimizer=optimizer), own, compute_dtype, others)
        if errors:
            found.append(errors)
    shared = [mistake for mistake in found[0] if all(mistake in errors for errors in found)] if found else []
    return {mistake: max(errors[mistake] for errors in found) for mistake in shared}


def _of_group(update: Update, names: Sequence[str], factor: float) -> Update:
    """Returns an update of some parameters, at their learning rate."""
    clipped = {name: update.clipped[name] for name in names if name in update.clipped}
    return replace(update, clipped=clipped, lr=factor * update.lr)


def _mistaken_for(optimizer: Any, own: Values, groups: Iterable[Values]) -> Iterator[tuple[str, Any, float]]:
    """Yields the mistakes of updating a group as if it were none, or another."""
    of_group, factor = own
    plain = replace(optimizer, groups=())
    yield "decay of no group", replace(of_group, weight_decay=plain.weight_decay), 1.0
    yield "rate of no group", of_group, 1 / factor
    yield "groups left out", plain, 1 / factor
    for other, other_factor in groups:
        if (other, other_factor) != own:
            yield "values of another group", other, other_factor / factor
