"""Training, with every step recorded, and what it led to."""

import time
from collections.abc import Generator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.contract import Stepper
from mpcompare.entrant.setup import Stream
from mpcompare.interrupt import uninterrupted
from mpcompare.measure.clock import Clock
from mpcompare.race.turns import Progress, Turn
from mpcompare.records import Recorder
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.task import Task, with_values

WRITE_EVERY_S = 0.1  # steps are written at least this often


def train(
    stepper: Stepper,
    stream: Stream,
    steps: int,
    warmup_steps: int,
    clip_norm: float | None,
    clock: Clock,
    recorder: Recorder,
) -> Generator[Progress | Turn, Any, list[dict[str, Any]]]:
    """Trains ``warmup_steps + steps`` steps and records each; returns the rows of ``steps.csv``."""
    rows: list[dict[str, Any]] = []
    on_disk = 0
    waiting: list[dict[str, Any]] = []  # steps whose values are not read yet
    backend = stepper.backend

    def read() -> None:
        nonlocal on_disk
        step_ms = clock.read()[::2]  # every second interval lies between two steps
        for step, ms in zip(waiting, step_ms, strict=False):  # the last step may be unfinished
            number = len(rows) + 1
            rows.append({"step": number, "warmup": number <= warmup_steps, **_numbers(step, clip_norm), "step_ms": ms})
        waiting.clear()
        recorder.steps(rows[on_disk:])
        on_disk = len(rows)

    total, written = warmup_steps + steps, time.monotonic()
    yield Progress(0, total, "first step")
    try:
        for number, batch in enumerate(islice(stream, total), start=1):
            before = {"lr": keep(stepper.rates.now), "loss_scale": keep(backend.loss_scale())}
            clock.mark()
            loss = stepper.step(batch)
            clock.mark()
            after = {"loss": keep(loss), "skipped": keep(backend.skipped), "grad_norm": keep(backend.grad_norm)}
            waiting.append({**before, **after})
            if time.monotonic() - written > WRITE_EVERY_S or number == total:
                with uninterrupted():
                    read()
                written = time.monotonic()
                row = rows[-1]
                text = f"{number}/{total}  loss {row['loss']:.4f}  {row['step_ms']:.4g} ms/step"
                yield Progress(number, total, text + ("  warm-up" if row["warmup"] else ""))
    finally:
        if waiting:
            with uninterrupted():
                read()
    return rows


def _numbers(step: Mapping[str, Any], clip_norm: float | None) -> dict[str, Any]:
    """What was kept of a step as plain numbers. One that was skipped clips nothing."""
    norm, skipped = step["grad_norm"], bool(step["skipped"])
    return {
        **{name: float(step[name]) for name in ("loss", "lr", "loss_scale")},
        "skipped": skipped,
        "grad_norm": None if norm is None else float(norm),
        "clipped": clip_norm is not None and norm is not None and not skipped and float(norm) > clip_norm,
    }


def keep(value: float | Tensor | None) -> float | Tensor | None:
    """The value; on a GPU a copy to be read later: the step must not wait, and may overwrite its own tensor."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_cuda else value.item()
    return value


def evaluate(
    model: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], dataset: Dataset, task: Task
) -> dict[str, float | None]:
    """Loss and accuracy on the held-out samples: from the master parameters, by the same IEEE fp32 code for every
    backend, in evaluation mode. Accuracy is of classes in the output's last dimension; None where there are none."""
    network = with_values(model, params, buffers).eval()
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
