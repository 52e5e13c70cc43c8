"""Known mistakes: updates that are not the optimizer's are compared with the updates that such a mistake makes.

A mistake is named only if it makes all updates of a tensor within the bounds of fp32, element by element, and the
optimizer does not. A guess that is off by a factor in one of a thousand elements is not named.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mpcompare.tasks.groups import in_group
from mpcompare.tasks.task import Task
from mpcompare.verdict.examine.errors import update_error
from mpcompare.verdict.examine.mistakes import at_another_rate, mistakes
from mpcompare.verdict.examine.seen import Known, Mistake, Seen, by
from mpcompare.verdict.judge.drive import KnownMistake

Values = tuple[Any, float]  # the optimizer of a group, and the factor of its learning rate


def known_mistakes(task: Task, updates: Sequence[Seen], compute_dtype: torch.dtype) -> dict[str, KnownMistake]:
    """Returns how far the updates are from each mistake, by the words for it; empty where the optimizer makes all.

    A mistake of several parameter groups must be possible in each group. Its distance is the largest of all groups.
    """
    groups: dict[Values, list[str]] = {}
    for name in dict.fromkeys(name for update in updates for name in update.clipped):
        groups.setdefault(in_group(task.optimizer, name, 0), []).append(name)
    found = []
    for (optimizer, factor), names in groups.items():
        own = replace(task, optimizer=optimizer)
        candidates = [*mistakes(own, compute_dtype), *_mistaken_for(task.optimizer, (optimizer, factor), groups)]
        if factor != 1:  # schedules at the group's own rate, not at the common one
            candidates += mistakes(replace(own, optimizer=replace(optimizer, lr=factor * optimizer.lr)), compute_dtype)
        if task.schedule.length and all(update.number for update in updates):  # a wrong first update is no sign of it
            candidates.append(at_another_rate(optimizer))
        if errors := _errors([_of_group(update, names, factor) for update in updates], own, candidates):
            found.append(errors)
    return of_all(found)


def of_all(found: Sequence[Mapping[str, KnownMistake]]) -> dict[str, KnownMistake]:
    """Returns the mistakes that are in each of ``found``, with the largest distance that they have there."""
    shared = [made for made in found[0] if all(made in errors for errors in found)] if found else []
    return {made: max((errors[made] for errors in found), key=lambda each: each.excess) for made in shared}


def _errors(updates: Sequence[Seen], task: Task, candidates: Iterable[Known]) -> dict[str, KnownMistake]:
    """Returns the largest error over its bound of each mistake, over the tensors that the optimizer does not make. Of
    several mistakes with the same words the nearest counts."""
    right = _excess(by(task.optimizer.replay()), updates)
    wrong = [name for name, worst in right.items() if not worst <= 1]
    errors: dict[str, KnownMistake] = {}
    for cause, made, mistake in candidates if wrong else ():
        worst = _excess(mistake, updates)
        known = errors.get(made, KnownMistake(cause, math.inf))
        errors[made] = replace(known, excess=min(known.excess, max(worst[tensor] for tensor in wrong)))
    return errors


def _excess(mistake: Mistake, updates: Sequence[Seen]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for update in updates:
        for name in update.clipped:
            change, magnitude = mistake(name, update)
            tensors = (update.before[name], update.after[name], change, magnitude)
            said = ~(update.after[name].isnan() & change.isnan())  # 0 / 0 on both sides is the same
            error = update_error(*(t[said] for t in tensors)) if said.any() else 0.0
            worst[name] = max(worst.get(name, 0.0), error)
    return worst


def _of_group(update: Seen, names: Sequence[str], factor: float) -> Seen:
    """Returns an update of some parameters, at their learning rate."""
    clipped = {name: update.clipped[name] for name in names if name in update.clipped}
    return replace(update, clipped=clipped, lr=factor * update.lr)


def _mistaken_for(optimizer: Any, own: Values, groups: Iterable[Values]) -> Iterator[Known]:
    """Yields the mistakes of updating a group as if it were no group, or another group."""
    if not getattr(optimizer, "groups", ()):
        return
    (of_group, factor), plain = own, replace(optimizer, groups=())

    def known(made: str, optimizer: Any, other: float = 1.0) -> Known:
        return Known("parameter groups", made, by(optimizer.replay(), lambda update: update.lr * other / factor))

    of_none = replace(of_group, weight_decay=plain.weight_decay)
    yield known("with the weight decay of parameters that are in no group", of_none, factor)
    yield known("at the learning rate of parameters that are in no group", of_group)
    yield known("as if there were no parameter groups", plain)
    yield from (known("with the values of another parameter group", *other) for other in groups if other != own)
