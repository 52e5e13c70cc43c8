"""Training, with every step recorded."""

import time
from collections.abc import Generator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from mpcompare.contract import Stepper
from mpcompare.entrant.evaluation import Evaluations
from mpcompare.entrant.monitor import Monitor
from mpcompare.entrant.resume import Saver
from mpcompare.entrant.setup import Stream
from mpcompare.instruments.clock import Clock
from mpcompare.interrupt import uninterrupted
from mpcompare.race.turns import Progress, Turn
from mpcompare.records import MONITORED, Recorder

WRITE_EVERY_S = 0.1  # steps are written at least this often


def train(
    stepper: Stepper,
    stream: Stream,
    steps: int,
    warmup_steps: int,
    clip_norm: float | None,
    clock: Clock,
    recorder: Recorder,
    evaluations: Evaluations | None = None,
    monitor: Monitor | None = None,
    begun: int = 0,
    saver: Saver | None = None,
) -> Generator[Progress | Turn, Any, list[dict[str, Any]]]:
    """Trains up to step ``warmup_steps + steps`` and records each; returns the rows of ``steps.csv``.

    Args:
        begun: how many steps were taken before.
        saver: saves checkpoints, of each of which all rows are on disk before; its time is in no step's.
    """
    rows: list[dict[str, Any]] = []
    on_disk = 0
    waiting: list[dict[str, Any]] = []  # steps whose values are not read yet
    backend = stepper.backend

    def read() -> None:
        nonlocal on_disk
        pieces = iter(clock.read()[::2])  # every second interval lies between two steps; the last may be unfinished
        for step in waiting:
            number, ms = begun + len(rows) + 1, sum(islice(pieces, step["pieces"]))
            rows.append({"step": number, "warmup": number <= warmup_steps, **_numbers(step, clip_norm), "step_ms": ms})
        waiting.clear()
        recorder.steps(rows[on_disk:])
        on_disk = len(rows)

    total, written = warmup_steps + steps, time.monotonic()
    yield Progress(begun, total, "first step" if begun == 0 else f"first step after {begun}")
    try:
        for number, batch in enumerate(islice(stream, total - begun), start=begun + 1):
            before = {"lr": keep(stepper.rates.now), "loss_scale": keep(backend.loss_scale())}
            seen: dict[str, Any] = {}
            if monitor and monitor.due(number):
                loss, seen, pieces = monitor.step(stepper, batch)
            else:
                clock.mark()
                loss, pieces = stepper.step(batch), 1
                clock.mark()
            after = {"loss": keep(loss), "skipped": keep(backend.skipped), "grad_norm": keep(backend.grad_norm)}
            waiting.append({**before, **after, **seen, "pieces": pieces})
            if evaluations and evaluations.due(number) and number < total:  # the last one is its caller's
                evaluations.take(number, backend)
            due = saver is not None and saver.is_due(number)
            if due or time.monotonic() - written > WRITE_EVERY_S or number == total:
                with uninterrupted():
                    read()
                if saver is not None and due:
                    saver.save(stepper, number)
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
        **{name: step.get(name) for name in MONITORED},
    }


def keep(value: float | Tensor | None) -> float | Tensor | None:
    """The value; on a GPU a copy to be read later: the step must not wait, and may overwrite its own tensor."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_cuda else value.item()
    return value
