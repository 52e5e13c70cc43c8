"""One backend on one task in one precision, and what is asked of it again and again."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare import loss_scale
from mpcompare.contract import Batches, Stepper
from mpcompare.errors import InputError
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.data import Dataset, batches
from mpcompare.tasks.task import Task
from mpcompare.verdict.examine.oracle import Exact, exact_step

POLICIES: tuple[LossScale, ...] = (
    NoLossScale(),
    StaticLossScale(256.0),
    DynamicLossScale(256.0, growth_interval=2),
)


@dataclass(frozen=True)
class Column:
    """A backend on one task in one precision."""

    backend_class: Any
    options: Mapping[str, Any]
    task_name: str
    task: Task
    dataset: Dataset
    precision: str
    device: torch.device

    @property
    def name(self) -> str:
        return f"{self.task_name} {self.precision}"

    def model(self, seed: int = 0) -> nn.Module:
        return self.task.new_model(seed, self.device)

    def make(self, model: nn.Module, policy: LossScale) -> Any:
        return self.backend_class(model, self.task, self.precision, copy.deepcopy(policy), **self.options)

    def batches(self, count: int) -> list[Batches]:
        """Of so many steps, each as its micro-batches."""
        stream = islice(batches(self.dataset, self.task.batch_size), count)
        return [self.task.micro_batches(x, y) for x, y in stream]

    def step(self, backend: Any, batch: Batches) -> Tensor:
        """A step at the task's learning rate."""
        return Stepper(backend, self.task.new_rates()).step(batch)

    def policy(self) -> LossScale:
        """The one that ``loss_scale=auto`` gives, or the first other that the backend accepts; raises InputError."""
        refused: InputError | None = None
        for policy in (loss_scale.auto(self.precision), *POLICIES):
            try:
                self.make(self.model(), policy)
            except InputError as error:
                refused = refused or error
            else:
                return policy
        assert refused is not None
        raise refused

    def new(self, seed: int = 0) -> Any:
        return self.make(self.model(seed), self.policy())

    def accepted(self, *policies: LossScale) -> Iterator[LossScale]:
        """Those that the backend does not refuse with an InputError."""
        for policy in policies:
            try:
                self.make(self.model(), policy)
            except InputError:
                continue
            yield policy

    def exact(self) -> Exact:
        """The first step in float64."""
        return exact_step(self.model(), self.task.loss_fn, self.batches(1)[0], PRECISIONS[self.precision])
