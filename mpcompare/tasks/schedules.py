"""The schedules: the learning rate of each update, as a multiple of the optimizer's."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from mpcompare.errors import InputError, check_number, check_whole


class Schedule(Protocol):
    """The learning rate over a run, as a factor of the optimizer's.

    It counts the updates that were taken: a step that is skipped because its gradients overflowed does not advance it.
    Otherwise the warm-up would pass while the loss scale is still searched, and the first updates would be large ones.
    """

    @property
    def length(self) -> int:
        """The number of updates after which the factor stays as it is."""

    def factor(self, updates: int) -> float:
        """Returns the factor of the next update after so many ``updates``; the first update is ``factor(0)``."""

    def over(self, total: int) -> "Schedule":
        """Returns the schedule of a run of ``total`` steps: a length that was left open becomes ``total``."""
        return self


@dataclass(frozen=True)
class Constant(Schedule):
    """The same learning rate from the first update to the last."""

    length = 0

    def factor(self, updates: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Warmup(Schedule):
    """Linear from ``1 / steps`` at the first update to 1 at the update number ``steps``, then constant (Goyal et al.,
    arXiv 1706.02677). Raises InputError where an attribute has another value."""

    steps: int  # at least 1

    def __post_init__(self) -> None:
        check_whole("task.schedule.steps", self.steps, at_least=1)

    @property
    def length(self) -> int:
        return self.steps

    def factor(self, updates: int) -> float:
        return min((updates + 1) / self.steps, 1.0)


@dataclass(frozen=True)
class Cosine(Schedule):
    """:class:`Warmup` over ``warmup_steps``, then half a cosine from 1 to ``min_factor``; from ``steps`` on the factor
    stays there (Loshchilov and Hutter, arXiv 1608.03983, without restarts). Raises InputError where an attribute has
    another value."""

    # updates from the first to the end of the cosine, warm-up included; None: all steps of the run
    steps: int | None = None
    warmup_steps: int = 0  # fewer than ``steps``, 0 for none
    min_factor: float = 0.0  # in [0, 1)

    def __post_init__(self) -> None:
        check_whole("task.schedule.warmup_steps", self.warmup_steps, at_least=0)
        check_number("task.schedule.min_factor", self.min_factor, at_least=0, below=1)
        if self.steps is not None:
            check_whole("task.schedule.steps", self.steps, at_least=1)
            if self.warmup_steps >= self.steps:
                expected = f"expected fewer than the {self.steps} steps of the whole schedule"
                raise InputError("task.schedule.warmup_steps", self.warmup_steps, expected)

    @property
    def length(self) -> int:
        return self.steps or 0

    def factor(self, updates: int) -> float:
        """Returns the factor after so many ``updates``. ``steps`` must be known: see :meth:`over`."""
        if self.steps is None:
            raise ValueError("a Cosine without steps is one over(total) steps")
        if updates < self.warmup_steps:
            return (updates + 1) / self.warmup_steps
        part = min((updates - self.warmup_steps) / (self.steps - self.warmup_steps), 1.0)
        return self.min_factor + (1 - self.min_factor) * (1 + math.cos(math.pi * part)) / 2

    def over(self, total: int) -> "Cosine":
        return self if self.steps is not None else replace(self, steps=total)


class Rates:
    """Learning rates of one run, step by step.

    If only a GPU knows whether a step was skipped, count and rate stay on the GPU, and nothing waits for them. A rate
    that changes is rounded to fp32 in every run, as a GPU holds it: so a run that goes on takes the same rates as an
    uninterrupted run. ``updates`` is the number of updates that were taken: a number, or a 0-d int64 tensor on the
    device. Where the rate never changes, a step that only a GPU knows to be skipped is counted, too.
    """

    def __init__(self, lr: float, schedule: Schedule, updates: int = 0) -> None:
        self.lr, self.schedule = lr, schedule
        self.updates: int | Tensor = updates

    @property
    def now(self) -> float | Tensor:
        """The learning rate of the next step: a number, or a 0-d fp32 tensor on the device."""
        last = self.schedule.length
        if last == 0:
            return self.lr * self.schedule.factor(0)
        if isinstance(self.updates, Tensor):
            return torch.take(self._on_device, self.updates.clamp(max=last))
        return self._table[min(self.updates, last)].item()

    @cached_property
    def _table(self) -> Tensor:
        """The rates after 0, 1, ... updates, fp32."""
        return torch.tensor([self.lr * self.schedule.factor(number) for number in range(self.schedule.length + 1)])

    @cached_property
    def _on_device(self) -> Tensor:
        assert isinstance(self.updates, Tensor)
        return self._table.to(self.updates.device)

    def count(self, skipped: bool | Tensor) -> None:
        """Counts a step that was taken, unless it was ``skipped``."""
        if isinstance(skipped, Tensor) and not skipped.is_cuda:
            skipped = bool(skipped)
        elif isinstance(skipped, Tensor) and self.schedule.length == 0:
            skipped = False  # a rate that never changes needs no count on the device
        self.updates = self.updates + (skipped == 0)
