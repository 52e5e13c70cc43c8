"""What the passes of one run share: the network, the batches, the clock, and a maker of backends."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpcompare.contract import Backend, Batches, State, Stepper
from mpcompare.entrant.plan import Plan
from mpcompare.instruments import machine
from mpcompare.instruments.clock import Clock, clock
from mpcompare.loss_scale import LossScale
from mpcompare.precision import PRECISIONS, resolve_precision
from mpcompare.records import Recorder
from mpcompare.shared import Shared
from mpcompare.tasks.data import Dataset, batches
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.task import Task, params_of, try_out

Stream = Iterator[Batches]


@dataclass(frozen=True)
class Setup:
    """Everything that is made once.

    Attributes:
        model: the network with its initial weights, on the device.
        engine: what the backend says computes its products.
        dataset: on the device.
    """

    device: torch.device
    precision: str
    engine: str
    loss_scale: LossScale
    model: nn.Module
    task: Task
    make_backend: Callable[[nn.Module, LossScale], Backend]
    dataset: Dataset
    clock: Clock

    def new_backend(self) -> Backend:
        """From the initial weights."""
        return self.make_backend(self.model, self.loss_scale)

    def new_stepper(self) -> Stepper:
        """From the initial weights and the first learning rate."""
        return Stepper(self.new_backend(), self.task.new_rates())

    def stepper_at(self, state: State, updates: int) -> Stepper:
        """A new backend that continues from ``state``, to which so many ``updates`` led."""
        backend = self.new_backend()
        backend.load_state_dict(state)
        return Stepper(backend, self.task.new_rates(updates))

    def batches(self, served: int = 0) -> Stream:
        """The training batches, over and over, each as its micro-batches: from the first on, or after ``served``."""
        return (self.task.micro_batches(x, y) for x, y in batches(self.dataset, self.task.batch_size, served))


def set_up(plan: Plan, recorder: Recorder, shared: Shared) -> Setup:
    """Makes what the passes share, and records what it is."""
    machine.set_deterministic(plan.deterministic)
    device = machine.select_device(plan.device)
    precision = resolve_precision(plan.precision, plan.make_backend.PRECISIONS, device, plan.backend)
    loss_scale = plan.loss_scale(precision) if callable(plan.loss_scale) else plan.loss_scale
    machine.set_tf32(PRECISIONS[precision].uses_tf32)
    task = plan.task.over(plan.total)
    model = task.new_model(plan.seed, device)

    def make_backend(model: nn.Module, loss_scale: LossScale) -> Backend:
        return plan.make_backend(model, task, precision, copy.deepcopy(loss_scale), **plan.options)

    start = time.perf_counter()
    engine = make_backend(model, loss_scale).engine  # before the data: what cannot work says so at once
    construct_s = time.perf_counter() - start
    found = shared.once("dataset", lambda: _with_fingerprint(plan.dataset()))
    data_fingerprint = found.pop("fingerprint")
    dataset = Dataset(**found).to(device)
    try_out(model, task, dataset.x_train, dataset.y_train, dataset.name)
    recorder.add(
        precision=precision,
        engine=engine,
        loss_scale=loss_scale.name,
        construct_s=construct_s,
        dataset=dataset.name,
        dataset_reason=dataset.reason,
        dataset_fingerprint=data_fingerprint,
        initial_weights=fingerprint(params_of(model)),
        **machine.provenance(device),
    )
    return Setup(device, precision, engine, loss_scale, model, task, make_backend, dataset, clock(device))


def _with_fingerprint(dataset: Dataset) -> dict[str, Any]:
    """Its tensors and names, and its fingerprint, which takes as long as all the rest where there is much data."""
    return {**vars(dataset), "fingerprint": dataset.fingerprint}
