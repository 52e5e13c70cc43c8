"""The one clock and the one memory meter. They belong to the harness, depend on the device, and know no backend."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from mpcompare.interrupt import uninterrupted

# torch's profiler writes its own start and stop to stderr, and an error where there is no GPU driver.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class Clock(Protocol):
    """Times steps one by one. Steps are read in blocks, because reading waits for the device.

    Attributes:
        block: how many steps to run between two reads.
    """

    block: int

    def start(self) -> None:
        """Before a step."""

    def stop(self) -> None:
        """After a step."""

    def read(self) -> list[float]:
        """Milliseconds of each step since the last read; waits until they are done."""


class CpuClock:
    """Wall time: on a CPU a step is done when its last call returns."""

    block = 1

    def __init__(self) -> None:
        self._times: list[float] = []

    def start(self) -> None:
        self._start = time.perf_counter_ns()

    def stop(self) -> None:
        self._times.append((time.perf_counter_ns() - self._start) / 1e6)

    def read(self) -> list[float]:
        times, self._times = self._times, []
        return times


class CudaClock:
    """CUDA events around every step, synchronized once a block, so that the device never waits for the clock inside."""

    block = 10

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def stop(self) -> None:
        stop = torch.cuda.Event(enable_timing=True)
        stop.record()
        self._events.append((self._start, stop))

    def read(self) -> list[float]:
        torch.cuda.synchronize()
        events, self._events = self._events, []
        return [start.elapsed_time(stop) for start, stop in events]


def clock(device: torch.device) -> Clock:
    """The clock for ``device``."""
    return CudaClock() if device.type == "cuda" else CpuClock()


def percentiles(step_ms: list[float]) -> dict[str, float]:
    """``step_ms_p20``, ``step_ms_p50`` (the median) and ``step_ms_p80``; no outlier is removed."""
    values = np.percentile(step_ms, (20, 50, 80))
    return {f"step_ms_p{p}": float(value) for p, value in zip((20, 50, 80), values, strict=True)}


def peak_memory(device: torch.device, run: Callable[[], None]) -> int:
    """The most bytes that torch's allocator had handed out at a time while ``run`` ran, above the level at its start.

    On CUDA that is ``max_memory_allocated``; on a CPU the sum over the allocator's own events, from torch's profiler.
    Memory that libraries take by themselves (cuBLAS workspace outside torch, buffers of a CPU GEMM) is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with uninterrupted():
        profile.start()
    try:
        run()
    finally:
        with uninterrupted():
            profile.stop()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    return int(np.cumsum([0, *(event["args"]["Bytes"] for event in changes)]).max())
