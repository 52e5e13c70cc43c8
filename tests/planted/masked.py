"""Planted bugs of masked labels: micro-batches that hold another number of labels each."""

from dataclasses import replace
from functools import partial
from typing import Any

from planted.registry import BF16, Family
from support.tasks import part
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.text import ALPHABET, topics
from mpcompare.tasks.losses import MaskedCrossEntropy
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt

MODEL = partial(CharGpt, len(ALPHABET), 24, 32, 4, 2)
BASE = Task(MODEL, "masked_cross_entropy", Sgd(0.1, 0.9), 16, accumulate=4)


def make(**changes: Any) -> tuple[Task, Dataset]:
    return replace(BASE, **changes), part(topics(0, 24, masked=0.45), 640)


MASKED = Family("masked", make, steps=12, precisions=BF16)


@MASKED.plants("accumulation")
class MeanOfMeans(Amp):
    """The loss of each micro-batch is divided by the number of micro-batches, whatever the number of its labels
    (transformers#34191)."""

    def backward(self) -> None:
        self.share = None
        super().backward()


@MASKED.plants("accumulation")
class MeanOfMeansByHand(MasterWeights):
    def backward(self) -> None:
        self.share = None
        super().backward()


@MASKED.plants("accumulation")
class DividedByTheirNumberToo(Amp):
    """The loss is weighted by its share of the labels, and divided by the number of micro-batches after all."""

    def backward(self) -> None:
        self.loss = self.loss / self.task.accumulate
        super().backward()


@MASKED.plants("gradient scaled")
class LabelsOfTheFirst(Amp):
    """The labels are counted once, in the step's first micro-batch, for all."""

    first: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        count = MaskedCrossEntropy().count(y)
        loss = super().forward(x, y)
        self.first = count if self.first is None else self.first
        self.share = count / self.first / self.task.accumulate
        return loss

    def update(self) -> None:
        super().update()
        self.first = None


@MASKED.plants("loss", task={"accumulate": 1})
class PaddingCounts(Amp):
    """The sum over the labels is divided by the number of all tokens, left-out tokens among them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        counted = MaskedCrossEntropy().count(y) / y.numel()
        self.loss, self.share = self.loss * counted, None
        return loss * counted


@MASKED.plants("loss", task={"accumulate": 1})
class PromptsCount(Amp):
    """The labels of prompts are 0, and not left out."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y.clamp(min=0))
