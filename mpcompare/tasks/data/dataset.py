"""Samples: whole, normalised, on the device before any timer, served in order in whole batches."""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpcompare.tasks.batch import Batch
from mpcompare.tasks.fingerprint import fingerprint

PARTS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Dataset:
    """Training and held-out samples. Each of the four parts may be a :class:`Tree` of such tensors.

    x is ``[N, ...]`` of any shape: fp32 values (images are ``[N, channels, height, width]``), or int64 ids of tokens
    (``[N, T]``). y is int64 classes ``[N]``, or ``[N, T]`` with a class for each token; or fp32 targets ``[N, ...]``.
    """

    name: str
    reason: str  # the reason why the data set was taken
    x_train: Batch
    y_train: Batch
    x_test: Batch
    y_test: Batch

    def to(self, device: torch.device) -> "Dataset":
        """Returns the same data on ``device``."""
        return replace(self, **{part: getattr(self, part).to(device) for part in PARTS})

    @property
    def fingerprint(self) -> str:
        """A hash of all samples, equal where the data are bit for bit the same."""
        return fingerprint({part: getattr(self, part) for part in PARTS})


def batches(dataset: Dataset, batch_size: int, served: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yields whole batches in order, over and over, from the one after those that were ``served`` before. A remainder
    shorter than a batch is left out. ``batch_size`` is at most the number of samples."""
    in_all = len(dataset.x_train) // batch_size
    return _numbered(dataset, batch_size, (number % in_all for number in itertools.count(served)))


def drawn_batches(dataset: Dataset, batch_size: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Yields whole batches, each drawn from all batches: nobody who does not know ``seed`` can foresee them."""
    generator, in_all = random.Random(seed), len(dataset.x_train) // batch_size
    return _numbered(dataset, batch_size, (generator.randrange(in_all) for _ in itertools.count()))


def _numbered(dataset: Dataset, batch_size: int, numbers: Iterable[int]) -> Iterator[tuple[Any, Any]]:
    for number in numbers:
        rows = slice(number * batch_size, (number + 1) * batch_size)
        yield dataset.x_train[rows], dataset.y_train[rows]
