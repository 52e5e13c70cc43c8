"""A run in this process, as its record would be read back: for what needs many."""

import copy
import json
from itertools import islice
from pathlib import Path

import pandas as pd
import torch

from mpcompare import loss_scale
from mpcompare.contract import Backend, step
from mpcompare.loss_scale import LossScale
from mpcompare.measure.examine import Subject, examine
from mpcompare.records import BLOCK_FIELDS, Run, finite, numbers
from mpcompare.tasks import data, mlp
from mpcompare.tasks.data import Dataset


def dataset_of(task: mlp.Task, seed: int = 0) -> Dataset:
    return data.digits(task, seed) if task.in_features == 784 else data.synthetic(task, seed)


def examined(
    name: str,
    backend_class: type[Backend],
    task: mlp.Task,
    dataset: Dataset,
    precision: str,
    seed: int = 0,
    policy: LossScale | None = None,
    steps: int = 20,
    noise: int = 0,
    device: str = "cpu",
) -> Run:
    """Trains ``steps`` steps and examines."""
    params = {key: p.to(device) for key, p in mlp.init_params(task.sizes, seed).items()}
    dataset = dataset.to(torch.device(device))
    policy = policy or loss_scale.auto(precision)

    def make(params: mlp.Params, policy: LossScale) -> Backend:
        return backend_class(params, task, precision, copy.deepcopy(policy), "auto")

    backend = make(params, policy)
    rows = []
    for number, batch in enumerate(islice(data.batches(dataset, task.batch_size), steps), start=1):
        scale = float(backend.loss_scale())
        loss = float(step(backend, *batch))
        rows.append({"step": number, "loss": loss, "loss_scale": scale, "skipped": bool(backend.skipped)})
    subject = Subject(make, params, policy, precision, task, lambda: data.batches(dataset, task.batch_size))
    turns = examine(subject, backend, rows, noise)
    while True:
        try:
            next(turns)
        except StopIteration as end:
            found = numbers(json.loads(json.dumps(finite(end.value))))
            break
    result = {
        "status": "ok", "backend": name, "precision": precision, "seed": seed, "dtypes": backend.dtypes(),
        "config": {"task": {}}, "task": "task", "batch_size": task.batch_size,
    }  # fmt: skip
    return Run(Path(name), name, result, pd.DataFrame(rows), pd.DataFrame(columns=list(BLOCK_FIELDS)), found)
