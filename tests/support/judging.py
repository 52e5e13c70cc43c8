"""Runs in this process, as their records would be read back: for tests that need many."""

from collections.abc import Mapping
from typing import Any

import torch

from mpcompare.loss_scale import LossScale
from mpcompare.report.runs import Run
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits, synthetic
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.tasks.task import Task
from mpcompare.testing import Candidate, examined_run


def examined(
    name: str,
    backend_class: Any,
    task: Task,
    dataset: Dataset,
    precision: str,
    policy: LossScale | None = None,
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
    **more: int,
) -> Run:
    """Trains a backend and examines it; ``more`` are the steps, the seed and the noise runs."""
    where = torch.device(device)
    candidate = Candidate(backend_class, task, dataset.to(where), precision, options or {}, where)
    return examined_run(name, candidate, scaling=policy, **more)


def dataset_of(task: Task, seed: int = 0) -> Dataset:
    """Returns data of an MLP's shape."""
    mlp = plain_mlp(task.new_model(0, torch.device("cpu")), task)
    if mlp.in_features == 784 and task.loss == "cross_entropy" and mlp.out_features == 10:
        return digits(seed, task.samples)
    return synthetic(seed, task.samples, mlp.in_features, mlp.out_features, mlp.loss)
