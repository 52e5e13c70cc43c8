"""The memory meter: the memory that torch's allocator handed out at the fullest moment, and the resident set.

Like the clock it belongs to the harness, depends on the device, and knows no backend. Three views cannot replace each
other. The allocator counts tensors, exactly. On CUDA the allocator reserves more than it hands out. The resident set is
all memory that the process has touched, with workspaces of libraries and freed memory that was kept.
"""

import ctypes
import gc
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from mpcompare.interrupt import uninterrupted

# torch's profiler writes its own start and stop to stderr, and an error where there is no GPU driver.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# The memory of these operators is named after the operator that called them, if there is one.
EMPTY = ("aten::empty", "aten::new_empty")  # and empty_like, empty_strided, ...
KINETO_DEVICE = {"cpu": 0, "cuda": 1}  # c10::DeviceType, as the profiler writes it
T = TypeVar("T")


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a run, in bytes."""

    bytes: int  # the most that torch's allocator had handed out at a time, above the level at the start
    by_op: dict[str, int]  # the bytes that are live then, by the innermost operator that asked for them, largest first
    reserved_bytes: int | None = None  # the most that torch's CUDA allocator held, handed out or not; None on a CPU
    graph_pool_bytes: int | None = None  # the reserved part in private pools, which CUDA graphs have; None on a CPU
    workspace_bytes: int | None = None  # the part of ``bytes`` that cuBLAS holds in the end; None on a CPU


def peak_memory(device: torch.device, run: Callable[[], object]) -> Peak:
    """Returns the peak of ``run``, which is profiled: not to be timed. Its result lives until the peak is known.

    On CUDA ``bytes`` is ``max_memory_allocated``; on a CPU it is the sum over the allocator's own events. Memory that
    libraries take by themselves (cuBLAS where it does not ask torch, buffers of a CPU GEMM) is not seen. On a CPU
    memory that other threads of Python ask for is not seen either.
    """
    gc.collect()  # garbage that is there already must not be freed, and subtracted, in the middle of the run
    if device.type == "cpu":
        return Peak(*_fullest(_profile(run)[0], device))
    free_cublas_workspaces(device)  # workspaces that an earlier run left would not be charged to this run
    torch.cuda.empty_cache()  # memory that earlier runs left reserved is not this run's
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    events, _alive = _profile(run)  # a graph that is gone has freed its pool, and the workspaces in it
    torch.cuda.synchronize(device)
    return Peak(
        # The replay of a graph allocates nothing: after a reset this does not count the memory that an earlier capture
        # took. The graph's pool, below, does.
        bytes=torch.cuda.max_memory_allocated(device) - before,
        by_op=_fullest(events, device)[1],
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        graph_pool_bytes=sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == torch.cuda.current_device() and tuple(segment["segment_pool_id"]) != (0, 0)
        ),
        workspace_bytes=free_cublas_workspaces(device),
    )


def free_cublas_workspaces(device: torch.device) -> int:
    """Frees the workspaces that torch's allocator has given to cuBLAS; returns their bytes.

    torch keeps one for each pair of a cuBLAS handle and a stream from its first product on: 32 MiB on Hopper
    (CUBLAS_WORKSPACE_CONFIG). Every thread has a handle of its own, so autograd's backward takes a second one, and a
    capture, which has its own stream, more. A torch that frees a workspace after each product has none to free here.
    """
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # torch has no public name for it
        torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)


def _profile(run: Callable[[], object]) -> tuple[list[dict[str, Any]], object]:
    """Runs it under torch's profiler; returns the events of the chrome trace, times in microseconds, and its result."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with uninterrupted():
        profile.start()
    try:
        result = run()
    finally:
        with uninterrupted():
            profile.stop()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return json.loads(trace.read_text())["traceEvents"], result


def _fullest(events: Iterable[dict[str, Any]], device: torch.device) -> tuple[int, dict[str, int]]:
    """Returns the highest level of the allocator, and the bytes that were live then by operator."""
    highest, live = fullest([(size, place, (op, size)) for op, place, size in _changes(events, device.type)])
    by_op: Counter[str] = Counter()
    for op, size in live:
        by_op[op] += size
    return highest, dict(by_op.most_common())


def fullest(changes: Sequence[tuple[int, int, T]], start: int = 0) -> tuple[int, list[T]]:
    """Returns the highest level of an allocator after some changes, and what is live at the first such moment. A change
    is its bytes, negative for a free, its place in memory, and a note on it. The first ``start`` changes are over
    before a moment counts."""
    level = np.cumsum([0, *(size for size, _, _ in changes)])
    end = start + int(level[start:].argmax())
    live: dict[int, T] = {}
    for size, place, known in changes[:end]:
        if size > 0:
            live[place] = known
        else:
            live.pop(place, None)  # None: the memory is older than the first change
    return int(level[end]), list(live.values())


def _changes(events: Iterable[dict[str, Any]], device_type: str) -> Iterator[tuple[str, int, int]]:
    """Yields allocations and frees in their order: operator, address, and bytes, negative for a free.

    One pass in order of time, in which every thread has the stack of its operators that have not ended.
    """
    events = [event for event in events if event.get("cat") == "cpu_op" or event.get("name") == "[memory]"]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))  # an operator before its callees
    running: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        stack = running[event["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] < event["ts"]:
            stack.pop()
        if event["name"] != "[memory]":
            stack.append(event)
        elif event["args"]["Device Type"] == KINETO_DEVICE[device_type]:
            yield _asker([op["name"] for op in stack]), event["args"]["Addr"], event["args"]["Bytes"]


def _asker(stack: list[str]) -> str:
    """Returns the innermost operator that does more than make an empty tensor; else the outermost; ``-`` outside."""
    return next((name for name in reversed(stack) if not name.startswith(EMPTY)), stack[0] if stack else "-")


def rss_bytes(pid: int | None = None) -> int | None:
    """Returns the resident set of this process, or of another, now; None where that is not known (elsewhere than on
    Linux)."""
    return _proc_status("VmRSS", pid)


def data_bytes() -> int | None:
    """Returns the bytes that this process may write into and shares with nobody, touched or not: what the system counts
    for ``RLIMIT_DATA``. None where that is not known (elsewhere than on Linux)."""
    return _proc_status("VmData")


def peak_rss_bytes(pid: int | None = None) -> int | None:
    """Returns the largest resident set since the last reset, or since the process began; None where it is not known."""
    peak = _proc_status("VmHWM", pid)
    if peak is not None or pid is not None:
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def frozen() -> Iterator[None]:
    """Keeps the garbage collector off the objects that are there now: walking all imported ones takes it 150 ms.

    If some were frozen before, all stay so: walking the objects that forks share would copy their pages.
    """
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()


def release() -> None:
    """Frees garbage, and gives freed memory back: to the system where malloc can, and to the GPU's other processes."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def reset_peak_rss() -> bool:
    """Lets :func:`peak_rss_bytes` start again from the resident set of now; returns whether it can (on Linux).

    Garbage is freed first, and freed memory goes back to the system: a run that could reuse it would seem small.
    """
    if sys.platform != "linux":
        return False
    release()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _proc_status(field: str, pid: int | None = None) -> int | None:
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
        value = next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        return None
    return int(value) * 1024  # the kernel's "kB"
