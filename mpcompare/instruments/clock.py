"""The one clock. It belongs to the harness, depends on the device, and knows no backend."""

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch


class CpuClock:
    """A clock of wall time: on a CPU a step is done when its last call returns."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def mark(self) -> None:
        """Marks this moment."""
        self._marks.append(time.perf_counter_ns())

    def read(self) -> list[float]:
        """Returns the milliseconds between neighbouring marks since the last read; waits for the last mark."""
        marks, self._marks = self._marks, []
        return [(after - before) / 1e6 for before, after in itertools.pairwise(marks)]

    def wait(self) -> None:
        """Waits for nothing: a CPU queues nothing."""


class CudaClock:
    """A clock of CUDA events on the current stream: the device never waits for it, only the reader does."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Marks the moment when everything queued so far is done."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def read(self) -> list[float]:
        marks, self._marks = self._marks, []
        if marks:
            marks[-1].synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]

    def wait(self) -> None:
        """Waits until the device has done all that was queued, on whatever stream."""
        torch.cuda.synchronize()


Clock = CpuClock | CudaClock


def clock(device: torch.device) -> Clock:
    """Returns the clock for ``device``."""
    return CudaClock() if device.type == "cuda" else CpuClock()


def settle(limit_s: float = 0.5) -> bool:
    """Waits until this process uses no core any more: OpenMP threads spin for some milliseconds after their work. A
    thread that other programs keep from a core uses none either, and is waited for. Returns whether they stopped within
    ``limit_s``; with ``OMP_WAIT_POLICY=active``, say, they do not."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        used = time.process_time()
        time.sleep(0.002)
        if time.process_time() - used < 0.0005 and not _others_run():
            return True
    return False


def _others_run() -> bool:
    """Whether another thread of this process has work to do, on a core or waiting for one; False where the system does
    not say."""
    for thread in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state = thread.read_text().rpartition(")")[2].split()[0]
            if state == "R" and int(thread.parent.name) != threading.get_native_id():
                return True
    return False


def percentiles(step_ms: Sequence[float]) -> dict[str, float]:
    """Returns ``step_ms_p20``, ``step_ms_p50`` (the median) and ``step_ms_p80``; no outlier is removed."""
    values = np.percentile(step_ms, (20, 50, 80))
    return {f"step_ms_p{p}": float(value) for p, value in zip((20, 50, 80), values, strict=True)}
