"""The loop: batches x backend x clock -> records. Everything around it that makes the comparison fair is here too."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import rich.console
import rich.progress
import torch
from torch import Tensor

from mpcompare import machine, measure, mlp
from mpcompare.backend import Backend, resolve_precision
from mpcompare.data import Dataset, batches
from mpcompare.errors import check_whole
from mpcompare.interrupt import uninterrupted
from mpcompare.loss_scale import LossScale
from mpcompare.records import STEP_FIELDS, Recorder


@dataclass(frozen=True)
class Job:
    """One run, as plain values.

    Attributes:
        backend: the name under which it was chosen.
        make_backend: the backend's class.
        load_data: ``(task, seed) -> Dataset``.
        loss_scale: a policy, or a function from the resolved precision to one.
        precision, engine, device: as asked for, ``auto`` included.
        steps, warmup_steps: timed steps, after warm-up steps that train too but are not timed.
    """

    backend: str
    make_backend: type[Backend]
    task: mlp.Task
    load_data: Callable[[mlp.Task, int], Dataset]
    loss_scale: LossScale | Callable[[str], LossScale]
    precision: str
    engine: str
    device: str
    seed: int
    steps: int
    warmup_steps: int

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, at_least=0, at_most=2**32 - 1)  # the generator takes 32 bits
        check_whole("train.steps", self.steps, at_least=1)
        check_whole("train.warmup_steps", self.warmup_steps, at_least=0)


def run(job: Job, recorder: Recorder) -> None:
    """Trains, evaluates and measures memory, and writes what it finds with ``recorder``."""
    device = machine.select_device(job.device)
    precision = resolve_precision(job.precision, job.make_backend.PRECISIONS, device, job.backend)
    loss_scale = job.loss_scale(precision) if callable(job.loss_scale) else job.loss_scale
    machine.set_tf32(precision == "tf32")
    params = {name: p.to(device) for name, p in mlp.init_params(job.task.sizes, job.seed).items()}

    def make_backend(engine: str) -> Backend:
        return job.make_backend(params, job.task, precision, copy.deepcopy(loss_scale), engine)

    backend = make_backend(job.engine)  # before the data: what cannot work says so at once
    dataset = job.load_data(job.task, job.seed)
    dataset.check(job.task)
    dataset = dataset.to(device)
    recorder.add(
        precision=precision,
        engine=backend.engine,
        loss_scale=loss_scale.name,
        dataset=dataset.name,
        dataset_reason=dataset.reason,
        dataset_fingerprint=dataset.fingerprint,
        initial_weights=mlp.fingerprint(params),
        **machine.provenance(device),
    )

    rows = train(backend, batches(dataset, job.task.batch_size), job.steps, job.warmup_steps, device, recorder)
    timed = measure.percentiles([row["step_ms"] for row in rows if not row["warmup"]])
    seconds = timed["step_ms_p50"] / 1e3
    machine.set_tf32(False)  # for evaluate: IEEE fp32 whatever was trained
    engine, masters, final_loss_scale = backend.engine, backend.master_params(), float(backend.loss_scale())
    recorder.add(
        **timed,
        first_step_ms=rows[0]["step_ms"],
        samples_per_s=job.task.batch_size / seconds,
        tflops=job.task.flops_per_step / seconds / 1e12,
        skipped_steps=sum(row["skipped"] for row in rows),
        final_loss=rows[-1]["loss"],
        final_loss_scale=final_loss_scale,
        dtypes=backend.dtypes(),
        **evaluate(masters, dataset, job.task),
    )
    del backend, masters

    machine.set_tf32(precision == "tf32")
    x, y = next(batches(dataset, job.task.batch_size))
    peak = measure.peak_memory(device, lambda: _two_steps(make_backend(engine), x, y))
    model = job.make_backend.memory_model(job.task, precision, engine)
    recorder.add(
        peak_memory_bytes=peak + x.nbytes + y.nbytes,
        peak_memory_bytes_analytic=sum(model.values()) if model else None,
        memory_model=model,
        status="ok",
    )


def step(backend: Backend, x: Tensor, y: Tensor) -> Tensor:
    """One training step: the five phases in their order. Returns the loss."""
    loss = backend.forward(x, y)
    backend.backward()
    backend.unscale()
    backend.step()
    backend.update()
    return loss


def train(
    backend: Backend,
    stream: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    warmup_steps: int,
    device: torch.device,
    recorder: Recorder,
) -> list[dict[str, Any]]:
    """Trains ``warmup_steps + steps`` steps and records each; returns the rows of ``steps.csv``."""
    clock = measure.clock(device)
    rows: list[dict[str, Any]] = []
    waiting: list[tuple[Tensor, float | Tensor, bool]] = []  # steps whose values are not read from the device yet

    def read() -> None:
        first = len(rows)
        for (loss, scale, skipped), step_ms in zip(waiting, clock.read(), strict=False):  # the last may be unfinished
            number = len(rows) + 1
            values = (number, number <= warmup_steps, float(loss), float(scale), skipped, step_ms)
            rows.append(dict(zip(STEP_FIELDS, values, strict=True)))
        waiting.clear()
        recorder.steps(rows[first:])

    total = warmup_steps + steps
    with progress_bar(total) as show:
        try:
            for number, (x, y) in enumerate(islice(stream, total), start=1):
                scale = backend.loss_scale()
                clock.start()
                loss = step(backend, x, y)
                clock.stop()
                waiting.append((loss, scale, backend.skipped))
                if number % clock.block == 0 or number == total:
                    with uninterrupted():
                        read()
                    show(rows[-1])
        finally:
            if waiting:
                with uninterrupted():
                    read()
    return rows


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar with loss and ms a step on stderr; nothing where that is not a terminal."""
    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.BarColumn(bar_width=30),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeRemainingColumn(),
    )
    # No refreshing thread: it would run beside the steps that are timed.
    with rich.progress.Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("first step", total=total)
        bar.refresh()
        drawn = time.monotonic()

        def show(row: dict[str, Any]) -> None:
            nonlocal drawn
            if time.monotonic() - drawn < 0.1:
                return
            text = f"loss {row['loss']:.4f}  {row['step_ms']:.1f} ms/step{'  warm-up' if row['warmup'] else ''}"
            bar.update(task, completed=row["step"], description=text, refresh=True)
            drawn = time.monotonic()

        yield show


def evaluate(params: mlp.Params, dataset: Dataset, task: mlp.Task) -> dict[str, float | None]:
    """Loss and accuracy of the master parameters on the held-out samples: the same IEEE fp32 code for every backend."""
    params = {name: p.contiguous() for name, p in params.items()}  # amp's and fp32's are transposed views
    total, correct = 0.0, 0
    for x, y in zip(dataset.x_test.split(2048), dataset.y_test.split(2048), strict=True):
        output = mlp.forward(params, x)
        total += mlp.loss_fn(task.loss, output, y).item() * len(x)
        if task.loss == "cross_entropy":
            correct += int((output.argmax(dim=1) == y).sum())
    n = len(dataset.x_test)
    return {"test_loss": total / n, "test_accuracy": correct / n if task.loss == "cross_entropy" else None}


def _two_steps(backend: Backend, x: Tensor, y: Tensor) -> None:
    """The second step runs with everything that outlives the first."""
    for _ in range(2):
        step(backend, x, y)
