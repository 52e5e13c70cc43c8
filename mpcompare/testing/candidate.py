"""One backend on one task in one precision, with the questions that several requirements ask of it; and the outcome."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from mpcompare.tasks.frozen import as_made
from mpcompare.tasks.task import Task
from mpcompare.tasks.trial import fitted
from mpcompare.verdict.examine.oracle import Exact, exact_step

CPU = torch.device("cpu")
LOSS_SCALES: tuple[LossScale, ...] = (NoLossScale(), StaticLossScale(256.0), DynamicLossScale(256.0, growth_interval=2))


@dataclass(frozen=True)
class Candidate:
    """A backend on one task in one precision."""

    backend_class: Any
    task: Task
    dataset: Dataset  # on the device
    precision: str
    options: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device = CPU
    task_name: str = "task"

    @property
    def name(self) -> str:
        return f"{self.task_name} {self.precision}"

    def fitted(self, seed: int = 0) -> tuple[nn.Module, Task]:
        """Returns a new network, and the task as the data and the network's output want it."""
        model = self.task.new_model(seed, self.device)
        return model, fitted(model, self.task, self.dataset.x_train, self.dataset.y_train)

    def model(self, seed: int = 0) -> nn.Module:
        return self.fitted(seed)[0]

    def make(self, model: nn.Module, scaling: LossScale) -> Any:
        return self.backend_class(as_made(model), self.task, self.precision, copy.deepcopy(scaling), **self.options)

    def batches(self, count: int) -> list[Batches]:
        """Returns the batches of so many steps, each as its micro-batches: copies, which a backend may spoil."""
        stream = islice(batches(self.dataset, self.task.batch_size), count)
        return [self.task.micro_batches(x.clone(), y.clone()) for x, y in stream]

    def step(self, backend: Any, batch: Batches) -> Tensor:
        """Takes a step at the task's learning rate, and returns the loss."""
        return Stepper(backend, self.task.new_rates()).step(batch)

    def accepted_scaling(self) -> LossScale:
        """Returns the loss scale of ``loss_scale=auto``, or the first other one that the backend accepts. Where it
        accepts none, returns the scale of auto: the backend then says why it refuses it."""
        auto = loss_scale.auto(self.precision)
        return next(filter(self._accepts, (auto, *LOSS_SCALES)), auto)

    def new(self, seed: int = 0) -> Any:
        return self.make(self.model(seed), self.accepted_scaling())

    def accepted(self, *scalings: LossScale) -> list[LossScale]:
        """Returns the loss scales that the backend does not refuse; where it refuses them all, one that it accepts."""
        return list(filter(self._accepts, scalings)) or [self.accepted_scaling()]

    def _accepts(self, scaling: LossScale) -> bool:
        try:
            self.make(self.model(), scaling)
        except InputError:
            return False
        return True

    def exact(self) -> Exact:
        """Returns the first step in float64."""
        return exact_step(self.model(), self.task.loss_fn, self.batches(1)[0], PRECISIONS[self.precision])


@dataclass(frozen=True)
class Checked:
    """The outcome of ``check_backend``: the list of what was checked, and of what was not.

    Attributes:
        candidates: each task and precision that was checked, ``mlp bf16``.
        skipped: the reason by what was not checked: a task and precision, or one check there, ``mlp bf16, overflow``.
    """

    candidates: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


class BrokenContract(AssertionError):  # noqa: N818 - said as it is, like BackendUnavailable
    """The requirements that a backend breaks, a line each.

    Attributes:
        requirements: each broken one in a sentence, with the tasks and precisions in which it is broken.
    """

    def __init__(self, name: str, requirements: list[str]) -> None:
        self.requirements = requirements
        count = "one requirement" if len(requirements) == 1 else f"{len(requirements)} requirements"
        super().__init__("\n  ".join([f"{name} breaks {count} of the contract:", *requirements]))
