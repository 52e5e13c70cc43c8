"""The common ground of all passes of a run: the network, the batches, the clock, and a maker of backends."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpcompare.contract import Backend, Batches, State, Stepper
from mpcompare.cost import step_flops
from mpcompare.entrant.plan import Plan
from mpcompare.fields import SetUpRecord
from mpcompare.instruments import fp32_products, machine
from mpcompare.instruments.clock import Clock, clock
from mpcompare.loss_scale import LossScale
from mpcompare.precision import PRECISIONS, resolve_precision
from mpcompare.shared import Shared, is_large
from mpcompare.tasks.data import Dataset, batches, drawn_batches
from mpcompare.tasks.data.given import not_finite, refused
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.frozen import as_made
from mpcompare.tasks.task import Task, params_of
from mpcompare.tasks.trial import first_loss, fitted, try_out
from mpcompare.verdict.examine.exact_values import Lent, of_batch, of_network

Stream = Iterator[Batches]


@dataclass(frozen=True)
class Setup:
    """Everything that is made once."""

    device: torch.device
    record: SetUpRecord  # what ``result.json`` says of the setup
    loss_scale: LossScale  # the loss scale as training begins
    model: nn.Module  # the network with its initial weights, on the device
    lent: Lent  # the fingerprints of the network and of the first batch before any backend had them
    task: Task
    make_backend: Callable[[nn.Module, LossScale], Backend]
    dataset: Dataset  # on the device
    clock: Clock

    def new_backend(self) -> Backend:
        """Returns a backend with the initial weights."""
        return self.make_backend(self.model, self.loss_scale)

    def new_stepper(self) -> Stepper:
        """Returns a backend with the initial weights, at the first learning rate."""
        return Stepper(self.new_backend(), self.task.new_rates())

    def stepper_at(self, state: State, updates: int) -> Stepper:
        """Returns a new backend that continues from ``state``, to which so many ``updates`` led."""
        backend = self.new_backend()
        backend.load_state_dict(state)
        return Stepper(backend, self.task.new_rates(updates))

    def batches(self, served: int = 0) -> Stream:
        """Yields the training batches, over and over, each as its micro-batches; the first ``served`` are left out."""
        return (self.task.micro_batches(x, y) for x, y in batches(self.dataset, self.task.batch_size, served))

    def flops_of_step(self) -> int | None:
        """Returns the floating point operations of the matrix products of a step; None where nobody can count them."""
        x, y = next(self.batches())[0]
        flops = step_flops(self.model, self.task.loss_fn, x, y)
        return None if flops is None else self.task.accumulate * flops

    def drawn_batches(self, seed: int) -> Stream:
        """Yields training batches, each drawn at random, as its micro-batches."""
        return (self.task.micro_batches(x, y) for x, y in drawn_batches(self.dataset, self.task.batch_size, seed))


def device_and_precision(plan: Plan) -> tuple[torch.device, str]:
    """Returns the device of a run, and the name of its precision. Raises InputError where one cannot be had."""
    device = machine.select_device(plan.device)
    return device, resolve_precision(plan.precision, plan.make_backend.PRECISIONS, device.type, plan.backend)


def set_up(plan: Plan, shared: Shared) -> Setup:
    """Sets the flags of torch that the plan asks for, and makes everything that the passes have in common.

    Raises:
        InputError: a device, precision, task or data set cannot be had.
        BackendUnavailable: the backend cannot be had here, or cannot train this network.
    """
    machine.set_deterministic(plan.train.deterministic)
    device, precision = device_and_precision(plan)
    loss_scale = plan.loss_scale(precision) if callable(plan.loss_scale) else plan.loss_scale
    uses_tf32 = PRECISIONS[precision].uses_tf32
    fp32_products.set_tf32(uses_tf32)
    task = plan.task.over(plan.train.last_step)
    with fp32_products.tf32(uses_tf32):  # a user's module may set flags of its own when it is imported
        model = task.new_model(plan.seed, device)

    def make_backend(model: nn.Module, loss_scale: LossScale) -> Backend:
        return plan.make_backend(as_made(model), task, precision, copy.deepcopy(loss_scale), **plan.options)

    initial_weights, network = fingerprint(params_of(model)), of_network(model)
    start = time.perf_counter()
    _share(model, shared, f"weights-{initial_weights}")
    engine = make_backend(model, loss_scale).engine  # before the data, so that errors come at once
    construct_s = time.perf_counter() - start
    with fp32_products.tf32(uses_tf32):
        loaded = shared.once("dataset", lambda: _with_fingerprint(plan.dataset()))
    dataset_fingerprint, infinite = loaded.pop("fingerprint"), loaded.pop("not_finite")
    dataset = Dataset(**loaded).to(device)
    task = fitted(model, task, dataset.x_train, dataset.y_train)
    try_out(model, task, dataset.x_train, dataset.y_train, dataset.name, dataset.y_test)
    infinite = infinite or first_loss(model, task, *next(batches(dataset, task.batch_size)))
    if infinite and not plan.train.not_finite:
        raise refused(dataset.name, infinite)
    record = SetUpRecord(
        precision=precision,
        engine=engine,
        loss_scale=loss_scale.name,
        construct_s=construct_s,
        dataset=dataset.name,
        dataset_reason=dataset.reason,
        dataset_fingerprint=dataset_fingerprint,
        initial_weights=initial_weights,
        not_finite=infinite,
    )
    return Setup(
        device=device,
        record=record,
        loss_scale=loss_scale,
        model=model,
        lent={**network, **of_batch(task.micro_batches(*next(batches(dataset, task.batch_size))))},
        task=task,
        make_backend=make_backend,
        dataset=dataset,
        clock=clock(device),
    )


def _share(model: nn.Module, shared: Shared, name: str) -> None:
    """Lets the entrants of a race have the initial weights of a large network once in memory. An entrant that writes
    into the weights gets copies of the pages that it wrote."""
    own = params_of(model)
    if shared.folder is not None and is_large(own):
        values = shared.once(name, lambda: own)
        for parameter, p in model.named_parameters():
            p.data = values[parameter]


def _with_fingerprint(dataset: Dataset) -> dict[str, Any]:
    """Returns the tensors and names of a data set, its fingerprint, and the places where it is not finite. The last two
    take long where there is much data."""
    return {**vars(dataset), "fingerprint": dataset.fingerprint, "not_finite": not_finite(dataset)}
