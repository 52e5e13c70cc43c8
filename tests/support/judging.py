"""Runs in this process, as their records would be read back: for what needs many."""

import torch

from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits, synthetic
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.tasks.task import Task
from mpcompare.testing import examined_run as examined

__all__ = ["dataset_of", "examined"]


def dataset_of(task: Task, seed: int = 0) -> Dataset:
    """Of an MLP's shape."""
    mlp = plain_mlp(task.new_model(0, torch.device("cpu")), task)
    if mlp.in_features == 784 and task.loss == "cross_entropy" and mlp.out_features == 10:
        return digits(seed, task.samples)
    return synthetic(seed, task.samples, mlp.in_features, mlp.out_features, mlp.loss)
