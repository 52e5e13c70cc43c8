"""A run as its record would be read back: trained and examined in this process, for whoever judges it."""

import copy
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from mpcompare import loss_scale
from mpcompare.contract import Backend, Batches, Stepper
from mpcompare.loss_scale import LossScale
from mpcompare.precision import PRECISIONS
from mpcompare.records import BLOCK_FIELDS, finite, numbers
from mpcompare.report.runs import Run
from mpcompare.tasks.data import Dataset, batches
from mpcompare.tasks.task import Task, params_of
from mpcompare.tasks.twin import examined_twin
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.examine import examine
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import from_document, to_document


def examined_run(
    name: str,
    backend_class: Any,
    task: Task,
    dataset: Dataset,
    precision: str,
    seed: int = 0,
    policy: LossScale | None = None,
    steps: int = 20,
    noise: int = 0,
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
) -> Run:
    """Trains and examines in this process; nothing is timed.

    Args:
        name: of the run and its backend.
        dataset: on any device.
        policy: the loss scale; None: what ``loss_scale=auto`` gives.
        noise: how many more runs measure the noise: two for one that others are judged beside.
        options: the backend's own.

    Returns:
        The run, as its record would be read back.
    """
    task = task.over(steps)
    model = task.new_model(seed, torch.device(device))
    dataset = dataset.to(torch.device(device))
    policy = policy or loss_scale.auto(precision)

    def make(model: nn.Module, policy: LossScale) -> Backend:
        return backend_class(model, task, precision, copy.deepcopy(policy), **(options or {}))

    def stream() -> Iterator[Batches]:
        return (task.micro_batches(x, y) for x, y in batches(dataset, task.batch_size))

    backend = make(model, policy)
    stepper = Stepper(backend, task.new_rates())
    rows = []
    for number, batch in enumerate(islice(stream(), steps), start=1):
        scale = float(backend.loss_scale())
        loss = float(stepper.step(batch))
        rows.append({"step": number, "loss": loss, "loss_scale": scale, "skipped": bool(backend.skipped)})
    initial = params_of(model)
    moved = numerics.sketch({name: p - initial[name] for name, p in backend.master_params().items()})
    twin, kinks = examined_twin(model, task)
    subject = Subject(
        make, model, policy, PRECISIONS[precision], task, stream, twin, kinks,
    )  # fmt: skip
    turns = examine(subject, stepper, rows, moved, noise)
    while True:
        try:
            next(turns)
        except StopIteration as end:
            findings = from_document(numbers(json.loads(json.dumps(finite(to_document(end.value))))))
            break
    result = {
        "status": "ok", "backend": name, "precision": precision, "seed": seed, "dtypes": backend.dtypes(),
        "config": {"task": {}}, "task": "task", "batch_size": task.batch_size,
    }  # fmt: skip
    return Run(Path(name), name, result, pd.DataFrame(rows), pd.DataFrame(columns=list(BLOCK_FIELDS)), findings)
