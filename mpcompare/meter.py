"""The memory meter."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mpcompare.interrupt import uninterrupted

# torch's profiler writes its own start and stop to stderr, and an error where there is no GPU driver.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


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
