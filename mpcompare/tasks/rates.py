"""The learning rate of each step, which the schedule gives by the number of updates before it."""

import torch
from torch import Tensor

from mpcompare.tasks.schedules import Schedule


class Rates:
    """Learning rates of one run, step by step.

    A skipped step is no update, so it does not advance the schedule: else the warm-up would pass while the loss scale
    is still searched. If only a GPU knows whether a step was skipped, count and rate stay on the GPU, and nothing waits
    for them.

    Attributes:
        updates: the number of updates that were taken: a number, or a 0-d int64 tensor on the device.
    """

    def __init__(self, lr: float, schedule: Schedule, updates: int = 0) -> None:
        self.lr, self.schedule = lr, schedule
        self.updates: int | Tensor = updates
        self.table: Tensor | None = None

    @property
    def now(self) -> float | Tensor:
        """The learning rate of the next step: a number, or a 0-d fp32 tensor on the device."""
        if not isinstance(self.updates, Tensor):
            return self.lr * self.schedule.factor(self.updates)
        if self.table is None:
            rates = [self.lr * self.schedule.factor(number) for number in range(self.schedule.length + 1)]
            self.table = torch.tensor(rates, device=self.updates.device)
        return torch.take(self.table, self.updates.clamp(max=self.schedule.length))

    def count(self, skipped: bool | Tensor) -> None:
        """Counts a step that was taken, unless it was ``skipped``."""
        if isinstance(skipped, Tensor) and not skipped.is_cuda:
            skipped = bool(skipped)
        elif isinstance(skipped, Tensor) and self.schedule.length == 0:
            skipped = False  # a rate that never changes needs no count on the device
        self.updates = self.updates + (skipped == 0)
