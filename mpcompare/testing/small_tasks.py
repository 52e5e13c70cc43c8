"""The small networks on which backends are checked."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits, synthetic
from mpcompare.tasks.mlp import Mlp
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt


def small_tasks() -> dict[str, tuple[Task, Dataset]]:
    """Returns the tasks on which a backend is checked, each with 12 batches: ``mlp``, ``recipe``, ``cnn`` and
    ``transformer``. They train with momentum, so that the optimizer has a state. ``recipe`` is the MLP with two
    micro-batches a step, and a norm of clipping that its gradients exceed."""
    optimizer = Sgd(0.1, 0.9)
    mlp = Task(partial(Mlp, 20, [24, 16], 5), "cross_entropy", optimizer, 32, 32 * 12)
    cnn = Task(_cnn, "cross_entropy", optimizer, 16, 16 * 12)
    gpt = Task(partial(CharGpt, vocabulary=16, length=8, width=32, heads=2, blocks=1), "cross_entropy", optimizer, 32)
    recipe = replace(mlp, accumulate=2, clip_norm=0.1)
    vectors = synthetic(0, 32 * 12, 20, 5, "cross_entropy")
    return {
        "mlp": (mlp, vectors),
        "recipe": (recipe, vectors),
        "cnn": (cnn, digits(0, 16 * 12)),
        "transformer": (gpt, _tokens(32 * 12)),
    }


def _cnn() -> nn.Module:
    """Makes a network from ``[N, 1, 28, 28]`` to ``[N, 10]``. A bias before a batch
    norm has no gradient, so the convolutions have none."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 7 * 7, 10),
    )  # fmt: skip


def _tokens(samples: int) -> Dataset:
    """Makes ids ``[samples, 8]`` below 16. Mostly an id is three times the id before it plus 1."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(16, (samples, 9), generator=generator)
    noise *= torch.rand(samples, 9, generator=generator) < 0.2
    ids = [torch.randint(16, (samples,), generator=generator)]
    for extra in noise.T[1:]:
        ids.append((3 * ids[-1] + 1 + extra) % 16)
    tokens = torch.stack(ids, dim=1)
    x, y = tokens[:, :-1], tokens[:, 1:]
    return Dataset("tokens", "asked for", x, y, x[:16], y[:16])
