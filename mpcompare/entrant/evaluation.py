"""Loss and accuracy on the held-out samples: of a network that was trained, and while it trains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpcompare.contract import Backend
from mpcompare.entrant.setup import Setup
from mpcompare.instruments import machine
from mpcompare.records import Recorder
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.task import Task, with_values

Scores = dict[str, float | None]  # test_loss and test_accuracy


def evaluate(
    model: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], dataset: Dataset, task: Task
) -> Scores:
    """:func:`score` of the master parameters, by the same IEEE fp32 code for every backend, in evaluation mode."""
    with machine.tf32(False):  # whatever was trained
        return score(with_values(model, params, buffers).eval(), dataset, task)


def score(network: Callable[[Tensor], Tensor], dataset: Dataset, task: Task) -> Scores:
    """Loss and accuracy on all held-out samples, as many at once as a micro-batch has, 2048 at most.

    Args:
        network: of inputs ``[n, ...]`` the outputs, in fp32 where the loss is to be.

    Returns:
        ``test_loss``, the mean over the samples; ``test_accuracy``, of classes in the output's last dimension, None
        where there are none.
    """
    total, correct, rows = 0.0, None, 0
    with torch.no_grad():
        rows_at_once = task.micro_batch_size
        for x, y in zip(dataset.x_test.split(2048), dataset.y_test.split(2048), strict=True):
            for x_part, y_part in zip(x.split(rows_at_once), y.split(rows_at_once), strict=True):
                output = network(x_part)
                total += task.loss_fn(output, y_part).item() * len(x_part)
                rows += len(x_part)
                if not y_part.is_floating_point() and output.shape[:-1] == y_part.shape:
                    correct = (correct or 0) + int((output.argmax(dim=-1) == y_part).sum())
    accuracy = None if correct is None else correct / dataset.y_test.numel()
    return {"test_loss": total / rows, "test_accuracy": accuracy}


@dataclass(frozen=True)
class Evaluations:
    """Evaluates between two steps, where no clock runs, and writes a row of ``evals.csv`` each time.

    Training does not notice: what is evaluated is a copy, in evaluation mode, and torch's generators are put back. The
    step after an evaluation may take longer all the same, for its caches are cold, and the resident set's peak over
    training holds what evaluating took.

    Attributes:
        every: after each so many steps; None: not before training is over.
    """

    setup: Setup
    recorder: Recorder
    every: int | None

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step, counted from 1."""
        return self.every is not None and step % self.every == 0

    def take(self, step: int, backend: Backend) -> Scores:
        """Evaluates a backend that took its step number ``step``."""
        setup = self.setup
        devices = [setup.device] if setup.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # a loss or a network of a user's may draw random numbers
            found = evaluate(setup.model, backend.master_params(), backend.buffers(), setup.dataset, setup.task)
        self.recorder.evaluation({"step": step, **found})
        return found
