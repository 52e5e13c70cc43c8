"""One entrant, from its first line to its last: a pass for each question, and turns, so that several can be compared.

what does it compute?     train, with every step recorded; then examine (examine.py)
how long is a step?       blocks of bare steps, in turns with the others
where does the time go?   blocks with a clock between the phases
how much must be live?    a few steps of a fresh backend under the memory meter
"""

import copy
import inspect
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpcompare.contract import PHASES, Backend, resolve_precision, step
from mpcompare.cost import memory
from mpcompare.errors import InputError, check_flag, check_whole
from mpcompare.interrupt import uninterrupted
from mpcompare.loss_scale import LossScale
from mpcompare.measure import clock as measure
from mpcompare.measure import examine, machine, meter
from mpcompare.measure.bystanders import Watch
from mpcompare.native import ops
from mpcompare.native.graph import WARMUP
from mpcompare.race.turns import Finish, Order, Progress, Time, Turn, Turns
from mpcompare.records import STEP_FIELDS, Recorder
from mpcompare.tasks import mlp
from mpcompare.tasks.data import Dataset, batches

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Job:
    """One run, as plain values.

    Attributes:
        backend: the name under which it was chosen.
        make_backend: the backend's class.
        options: keyword arguments of its own.
        load_data: ``(task, seed) -> Dataset``.
        loss_scale: a policy, or a function from the resolved precision to one.
        precision, engine, device: as asked for, ``auto`` included.
        steps, warmup_steps: training steps, and how many before them are marked as warm-up.
        deterministic: only algorithms that give the same bits every time.
        block_s: seconds that a timed block of steps takes, about.
        examine: whether what it computes is examined after training.
        noise: how many more runs of a baseline measure the noise then.
        is_baseline: whether others are compared with this backend.
    """

    backend: str
    make_backend: type[Backend]
    options: Mapping[str, Any]
    task: mlp.Task
    load_data: Callable[[mlp.Task, int], Dataset]
    loss_scale: LossScale | Callable[[str], LossScale]
    precision: str
    engine: str
    device: str
    seed: int
    steps: int
    warmup_steps: int
    deterministic: bool
    block_s: float
    examine: bool
    noise: int
    is_baseline: bool

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, at_least=0, at_most=2**32 - 1)  # the generator takes 32 bits
        check_whole("train.steps", self.steps, at_least=1)
        check_whole("train.warmup_steps", self.warmup_steps, at_least=0)
        check_flag("train.deterministic", self.deterministic)
        check_flag("verdict.enabled", self.examine)
        check_whole("verdict.noise", self.noise, at_least=0)
        signature = inspect.signature(self.make_backend)
        for name, value in self.options.items():
            try:
                signature.bind_partial(*[None] * 5, **{name: value})
            except TypeError as error:
                own = ", ".join(list(signature.parameters)[5:]) or "no options"  # after those that all backends have
                raise InputError(f"backend.{name}", value, f"backend={self.backend} takes {own}") from error


@dataclass(frozen=True)
class _Setup:
    """What the passes of one run share."""

    device: torch.device
    precision: str
    engine: str
    loss_scale: LossScale
    params: mlp.Params
    make_backend: Callable[[mlp.Params, LossScale], Backend]
    dataset: Dataset
    batches: Callable[[], Batches]
    clock: measure.Clock

    def new_backend(self) -> Backend:
        """From the initial weights."""
        return self.make_backend(self.params, self.loss_scale)


def run(job: Job, recorder: Recorder) -> Turns:
    """Everything that one run does, turn by turn (``race``); writes what it finds with ``recorder``."""
    yield Turn()  # what is slow to import is imported
    setup = _set_up(job, recorder)

    rss_before = meter.rss_bytes() if meter.reset_peak_rss() else None
    backend = setup.new_backend()
    rows = yield from train(backend, setup.batches(), job.steps, job.warmup_steps, setup.clock, recorder)
    peak_rss = meter.peak_rss_bytes()  # before evaluate, which has activations of its own
    with machine.tf32(False):  # IEEE fp32 whatever was trained
        evaluated = evaluate(backend.master_params(), setup.dataset, job.task)
    recorder.add(
        first_step_ms=rows[0]["step_ms"],
        skipped_steps=sum(row["skipped"] for row in rows),
        final_loss=rows[-1]["loss"],
        final_loss_scale=float(backend.loss_scale()),
        engine=backend.engine,
        dtypes=backend.dtypes(),
        rss_before_bytes=rss_before,
        peak_rss_bytes=peak_rss,
        **evaluated,
    )

    trained = copy.deepcopy(backend.state_dict())
    if job.examine:
        start, noise = time.monotonic(), job.noise if job.is_baseline else 0
        subject = examine.Subject(
            setup.make_backend, setup.params, setup.loss_scale, setup.precision, job.task, setup.batches
        )
        recorder.numerics((yield from examine.examine(subject, backend, rows, noise)))
        recorder.add(examine_s=time.monotonic() - start)
    steps = block_steps(backend, setup.batches(), job.block_s, setup.clock)
    del backend
    meter.release()
    measure.settle()
    with meter.frozen():
        finish, blocks = yield from _take_turns(setup, trained, steps, recorder, _trained(setup, rows))
    yield Progress(0, 1, "phases and memory")
    timed = measure.percentiles(blocks)
    seconds = timed["step_ms_p50"] / 1e3
    recorder.add(
        **timed,
        samples_per_s=job.task.batch_size / seconds,
        tflops=job.task.flops_per_step / seconds / 1e12,
        timing=vars(finish),
        **time_phases(_fresh(setup, trained), setup.batches(), steps, setup.clock),
    )
    recorder.add(**_memory(setup, job), status="ok")
    yield Progress(1, 1, "done")


def _set_up(job: Job, recorder: Recorder) -> _Setup:
    machine.set_deterministic(job.deterministic)
    device = machine.select_device(job.device)
    precision = resolve_precision(job.precision, job.make_backend.PRECISIONS, device, job.backend)
    loss_scale = job.loss_scale(precision) if callable(job.loss_scale) else job.loss_scale
    machine.set_tf32(precision == "tf32")
    params = {name: p.to(device) for name, p in mlp.init_params(job.task.sizes, job.seed).items()}

    def make_backend(params: mlp.Params, loss_scale: LossScale, engine: str) -> Backend:
        return job.make_backend(params, job.task, precision, copy.deepcopy(loss_scale), engine, **job.options)

    start = time.perf_counter()
    engine = make_backend(params, loss_scale, job.engine).engine  # before the data: what cannot work says so at once
    construct_s = time.perf_counter() - start
    dataset = job.load_data(job.task, job.seed)
    dataset.check(job.task)
    dataset = dataset.to(device)
    recorder.add(
        precision=precision,
        engine=engine,
        loss_scale=loss_scale.name,
        construct_s=construct_s,
        dataset=dataset.name,
        dataset_reason=dataset.reason,
        dataset_fingerprint=dataset.fingerprint,
        initial_weights=mlp.fingerprint(params),
        **machine.provenance(device),
    )
    return _Setup(
        device,
        precision,
        engine,
        loss_scale,
        params,
        partial(make_backend, engine=engine),
        dataset,
        lambda: batches(dataset, job.task.batch_size),
        measure.clock(device),
    )


def _trained(setup: _Setup, rows: Sequence[dict[str, Any]]) -> str:
    first, last = rows[0], rows[-1]
    return (
        f"{setup.engine}, {setup.dataset.name}, {len(rows)} steps, loss {last['loss']:.4f}, "
        f"first step {first['step_ms']:.4g} ms, last {last['step_ms']:.4g} ms"
    )


def _take_turns(
    setup: _Setup, trained: dict[str, Any], steps: int, recorder: Recorder, text: str
) -> Generator[Progress | Turn, Order | None, tuple[Finish, list[float]]]:
    """Blocks of ``steps`` steps, one a turn; returns why that ended, and the blocks' milliseconds a step."""
    order = yield Turn(text=text)
    blocks, watch = [], Watch(setup.device)
    while isinstance(order, Time):
        padding, backend, stream = _padding(setup.device), _fresh(setup, trained), setup.batches()
        time_block(backend, stream, _warmup(steps, setup.clock), setup.clock)
        watch.start()
        step_ms, wall_ms = time_block(backend, stream, steps, setup.clock)
        load = watch.stop()
        del padding, backend
        meter.release()
        settled = measure.settle()
        blocks.append(step_ms)
        row = {"round": order.round, "steps": steps, "step_ms": step_ms, "wall_ms": wall_ms, **load}
        recorder.block({**row, "settled": settled})
        order = yield Turn(step_ms)
    assert isinstance(order, Finish)
    return order, blocks


def _fresh(setup: _Setup, trained: dict[str, Any]) -> Backend:
    """A new backend in the state that training ended in.

    Each block has one: where a program's memory happens to lie makes it up to 5 % faster or slower for as long as it
    runs, so that blocks of one layout agree with each other and not with the next run's. Laid out anew, each block is
    an independent draw, and the interval holds that too (Curtsinger and Berger, "Stabilizer", ASPLOS 2013).
    """
    backend = setup.new_backend()
    backend.load_state_dict(copy.deepcopy(trained))  # torch's optimizers keep the tensors that they are given
    return backend


def _warmup(steps: int, clock: measure.Clock) -> int:
    """Steps before a block of ``steps``: after another's turn caches are cold, and fresh pages are not mapped yet; on
    CUDA a fresh backend also captures its graphs, in its third step at the latest."""
    return max(WARMUP + 1 if isinstance(clock, measure.CudaClock) else 1, steps // 4)


def _padding(device: torch.device) -> Tensor:
    """Up to 4 MB that shift what is allocated after it."""
    return torch.empty(random.randrange(1 << 12, 1 << 22), dtype=torch.uint8, device=device)


def _memory(setup: _Setup, job: Job) -> dict[str, Any]:
    """The peak of a fresh backend's first steps, and what the model says of it."""
    x, y = next(setup.batches())
    peak = meter.peak_memory(setup.device, lambda: _first_steps(setup.new_backend(), x, y))
    model = job.make_backend.memory_model(job.task, setup.precision, setup.engine, **job.options)
    workspaces = _workspaces(setup, peak)
    if model and setup.device.type == "cuda" and workspaces:  # there they are part of the peak
        model = {**model, "workspace": workspaces}
    return {
        "batch_bytes": x.nbytes + y.nbytes,
        "peak_memory_bytes": peak.bytes + x.nbytes + y.nbytes,
        "peak_memory_bytes_analytic": memory.allocated_bytes(model) if model else None,
        "memory_model": model,
        "memory_by_op": peak.by_op,
        "memory_reserved_bytes": peak.reserved_bytes,
        "graph_pool_bytes": peak.graph_pool_bytes,
        "workspace_bytes": sum(workspaces.values()),
    }


def _workspaces(setup: _Setup, peak: meter.Peak) -> dict[str, int]:
    """Bytes that matrix products hold to compute in, by who asked for them: a library's choice, so never predicted."""
    native = setup.engine.startswith("native")
    if setup.device.type == "cpu":
        found = {"packing buffers": ops.workspace_bytes() if native else 0}
    else:
        found = {"cuBLAS": peak.workspace_bytes or 0, "cublasLt": ops.lt_workspace_bytes() if native else 0}
    return {name: size for name, size in found.items() if size}


WRITE_EVERY_S = 0.1  # steps are written at least this often


def train(
    backend: Backend, stream: Batches, steps: int, warmup_steps: int, clock: measure.Clock, recorder: Recorder
) -> Generator[Progress | Turn, Any, list[dict[str, Any]]]:
    """Trains ``warmup_steps + steps`` steps and records each; returns the rows of ``steps.csv``."""
    rows: list[dict[str, Any]] = []
    on_disk = 0
    waiting: list[
        tuple[float | Tensor, float | Tensor, bool | float | Tensor]
    ] = []  # steps whose values are not read yet

    def read() -> None:
        nonlocal on_disk
        step_ms = clock.read()[::2]  # every second interval lies between two steps
        for (loss, scale, skipped), ms in zip(waiting, step_ms, strict=False):  # the last step may be unfinished
            number = len(rows) + 1
            values = (number, number <= warmup_steps, float(loss), float(scale), bool(skipped), ms)
            rows.append(dict(zip(STEP_FIELDS, values, strict=True)))
        waiting.clear()
        recorder.steps(rows[on_disk:])
        on_disk = len(rows)

    total, written = warmup_steps + steps, time.monotonic()
    yield Progress(0, total, "first step")
    try:
        for number, (x, y) in enumerate(islice(stream, total), start=1):
            scale = _keep(backend.loss_scale())
            clock.mark()
            loss = step(backend, x, y)
            clock.mark()
            waiting.append((_keep(loss), scale, _keep(backend.skipped)))
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


def _keep(value: float | Tensor) -> float | Tensor:
    """The value; on a GPU a copy to be read later: the step must not wait, and may overwrite its own tensor."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_cuda else value.item()
    return value


def time_block(backend: Backend, stream: Batches, steps: int, clock: measure.Clock) -> tuple[float, float]:
    """Milliseconds a step of ``steps`` bare steps, by the clock and by the wall: nothing is read or written between."""
    start = time.perf_counter()
    clock.mark()
    for x, y in islice(stream, steps):
        step(backend, x, y)
    clock.mark()
    (block_ms,) = clock.read()
    return block_ms / steps, (time.perf_counter() - start) * 1e3 / steps


def block_steps(backend: Backend, stream: Batches, block_s: float, clock: measure.Clock) -> int:
    """How many steps take about ``block_s``; at least one."""
    steps = 1
    while True:
        block_ms = time_block(backend, stream, steps, clock)[0] * steps
        if block_ms > block_s * 1e3 / 8:
            return max(1, round(steps * block_s * 1e3 / block_ms))
        steps *= 2


PHASE_BLOCKS = 4  # of each kind


def time_phases(backend: Backend, stream: Batches, steps: int, clock: measure.Clock) -> dict[str, Any]:
    """Where a step's time goes.

    Returns:
        ``phase_ms``, the median of each phase over all steps, None where it holds no work; ``phase_overhead``, what the
        clock between the phases costs relative to bare steps, in blocks that take turns.
    """
    phases, bare, clocked = [], [], []
    time_block(backend, stream, _warmup(steps, clock), clock)
    for number in range(2 * PHASE_BLOCKS):
        if number % 4 in (0, 3):  # bare, clocked, clocked, bare: drift hits both alike
            bare.append(time_block(backend, stream, steps, clock)[0])
            continue
        for x, y in islice(stream, steps):
            clock.mark()
            backend.forward(x, y)
            clock.mark()
            backend.backward()
            clock.mark()
            backend.unscale()
            clock.mark()
            backend.step()
            clock.mark()
            backend.update()
            clock.mark()
        intervals = clock.read()
        clocked.append(sum(intervals) / steps)
        phases.append(np.array([*intervals, 0.0]).reshape(-1, 6)[:, :5])  # the sixth lies between two steps
    medians = np.median(np.concatenate(phases), axis=0)
    named = zip(PHASES, medians.tolist(), strict=True)
    return {
        "phase_ms": {phase: None if phase in backend.IDLE_PHASES else ms for phase, ms in named},
        "phase_overhead": float(np.median(clocked) / np.median(bare) - 1),
    }


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


def _first_steps(backend: Backend, x: Tensor, y: Tensor) -> Backend:
    """The second step runs with everything that outlives the first; the third is where graphs are captured."""
    for _ in range(WARMUP + 1):
        step(backend, x, y)
    return backend
