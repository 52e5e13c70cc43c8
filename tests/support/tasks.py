"""Small MLPs as tasks, batches of their shape, and parts of data sets."""

from collections.abc import Sequence
from functools import partial

import torch

from mpcompare.tasks.data import Dataset
from mpcompare.tasks.mlp import Mlp, PlainMlp, plain_mlp
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task


def make_task(
    *,
    in_features: int = 20,
    hidden: Sequence[int] = (24, 16),
    out_features: int = 5,
    loss: str = "cross_entropy",
    batch_size: int = 32,
    samples: int = 96,
    **sgd: float,
) -> Task:
    """Returns the task of a small MLP that classifies; ``sgd`` are arguments of its optimizer, whose lr is 0.1."""
    optimizer = Sgd(**{"lr": 0.1, **sgd})
    return Task(partial(Mlp, in_features, hidden, out_features), loss, optimizer, batch_size, samples)


def mlp_of(task: Task) -> PlainMlp:
    """Returns the shape of such a task's MLP."""
    return plain_mlp(task.new_model(0, torch.device("cpu")), task)


def make_batch(task: Task, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns normal inputs ``[n, in]`` and random targets of the kind that the MLP's loss takes."""
    generator, mlp = torch.Generator().manual_seed(seed), mlp_of(task)
    n = task.batch_size
    x = torch.randn(n, mlp.in_features, generator=generator)
    if task.loss == "mse":
        return x.to(device), torch.randn(n, mlp.out_features, generator=generator).to(device)
    return x.to(device), torch.randint(mlp.out_features, (n,), generator=generator).to(device)


def part(dataset: Dataset, samples: int) -> Dataset:
    """Returns the first ``samples`` of the training samples, with 64 held-out ones."""
    return Dataset(dataset.name, dataset.reason, dataset.x_train[:samples], dataset.y_train[:samples],
                   dataset.x_test[:64], dataset.y_test[:64])  # fmt: skip
