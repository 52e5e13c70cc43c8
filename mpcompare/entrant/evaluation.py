"""Loss and accuracy on the held-out samples, after training and while a network trains."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.contract import Backend
from mpcompare.entrant.setup import Setup
from mpcompare.instruments import fp32_products
from mpcompare.records import EVALS, RunRecorder
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.draws import as_examined
from mpcompare.tasks.losses import count_of
from mpcompare.tasks.task import Task, with_values
from mpcompare.verdict.judge.held_out import HeldOut

Scores = dict[str, float | None]  # test_loss and test_accuracy


def evaluate(
    model: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], dataset: Dataset, task: Task
) -> Scores:
    """Returns the :func:`score` of the network with these fp32 parameters and buffers, in evaluation mode.

    The same IEEE fp32 code computes it for every backend.
    """
    with fp32_products.tf32(False):  # also after training in TF32
        return score(with_values(model, params, buffers).eval(), dataset, task)


def score(network: Callable[[Any], Any], dataset: Dataset, task: Task) -> Scores:
    """Returns loss and accuracy on all held-out samples, as many at once as a micro-batch has, 2048 at most. The random
    numbers of a network or a loss begin with one seed, and torch's generators are put back.

    Args:
        network: maps inputs ``[n, ...]`` to outputs, in fp32 if the loss is to be in fp32.

    Returns:
        ``test_loss``, the mean over the samples, or over the labels if the loss counts labels; ``test_accuracy``, for
        the classes in the output's last dimension, None where the targets are no classes.
    """
    total, correct, weights, labels = 0.0, None, 0, 0
    count = count_of(task.loss_fn)
    with torch.no_grad(), as_examined(dataset.x_test.device):
        rows_at_once = task.micro_batch_size
        for x, y in zip(dataset.x_test.split(2048), dataset.y_test.split(2048), strict=True):
            for x_part, y_part in zip(x.split(rows_at_once), y.split(rows_at_once), strict=True):
                output = network(x_part)
                weight = int(count(y_part)) if count else len(x_part)
                total += task.loss_fn(output, y_part).item() * weight
                weights += weight
                labels += weight if count else y_part.numel()
                classes = isinstance(output, Tensor) and isinstance(y_part, Tensor) and not y_part.is_floating_point()
                if classes and output.shape[:-1] == y_part.shape:
                    correct = (correct or 0) + int((output.argmax(dim=-1) == y_part).sum())
    accuracy = None if correct is None else correct / max(labels, 1)
    return {"test_loss": total / max(weights, 1), "test_accuracy": accuracy}


SHARE = 1 / 16  # of the samples that training sees: forward is a third of a step, so this is 2 % of training


def held_out_of(
    model: nn.Module, dataset: Dataset, task: Task, steps: int
) -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], HeldOut]:
    """Returns a function of parameters and buffers that evaluates them for the examination, always on the same held-out
    samples. These are evenly spread, and so few that they cost hardly anything compared with training. They are whole
    micro-batches, if there are enough samples: a loss may want so many rows."""
    rows = task.micro_batch_size
    samples = max(rows, int(SHARE * steps * task.batch_size))
    spread = torch.arange(0, len(dataset.x_test), -(-len(dataset.x_test) // samples))
    count = len(spread)
    few = spread[: count - count % rows if count >= rows else count]  # indexed, not strided: a network may use ``view``
    targets: Any = dataset.y_test[few]
    some = replace(dataset, x_test=dataset.x_test[few], y_test=targets)
    counted = count_of(task.loss_fn)
    labels = int(counted(targets)) if counted else targets.numel()

    def held_out(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> HeldOut:
        scores = evaluate(model, params, buffers, some, task)
        loss, accuracy = scores["test_loss"], scores["test_accuracy"]
        return HeldOut(math.nan if loss is None else loss, accuracy, max(labels, 1))

    return held_out


def record_evaluation(setup: Setup, recorder: RunRecorder, step: int, backend: Backend) -> Scores:
    """Evaluates a backend that took its step number ``step``, where no clock runs. Writes a row of ``evals.csv``, and
    returns its scores.

    Training does not notice: a copy of the network is evaluated, in evaluation mode, and torch's generators are put
    back. But the step after an evaluation may take longer, because caches are cold. And the peak of the resident set
    over training includes the memory of evaluating.
    """
    scores = evaluate(setup.model, backend.master_params(), backend.buffers(), setup.dataset, setup.task)
    recorder.append(EVALS, [{"step": step, **scores}])
    return scores
