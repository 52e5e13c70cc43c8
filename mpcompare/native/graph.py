"""A whole training step as one CUDA graph: one launch instead of dozens, and nothing waits for Python.

https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
"""

import functools
import gc
from collections.abc import Callable

import torch

from mpcompare.contract import BackendUnavailable

WARMUP = 2  # steps before the capture: libraries start, algorithms are searched, optimizers make their state


class StepGraph:
    """Calls ``step`` as it is ``WARMUP`` times, then captures it, and replays the capture from then on.

    A replay repeats the same kernels on the same addresses. So ``step`` takes its inputs from tensors that stay, leaves
    its results in tensors that stay, never waits for the device, and decides nothing on the host that may change.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step
        self.warmups_left = WARMUP
        self.replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.warmups_left:
            self.warmups_left -= 1
            warm_up(self.step)
            return
        if self.replay is None:
            self.replay = capture(self.step)
        self.replay()


def warm_up(step: Callable[[], None]) -> None:
    """Runs ``step`` on the stream of the captures: autograd remembers the one that it first ran on."""
    side, current = side_stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        step()
    current.wait_stream(side)


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """Records ``step`` without running it; returns a function that runs it."""
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    collects = gc.isenabled()
    gc.disable()  # a capture fails if an older graph is destroyed in it (pytorch PR 161037)
    try:
        # torch keeps a workspace for cuBLAS for each stream. It is cleared so that this graph gets one in its own
        # memory: an earlier graph's workspace is freed with that graph.
        if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
            torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.graph(graph, stream=side_stream()):
            step()
    finally:
        if collects:
            gc.enable()
    return graph.replay


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """Returns the stream that all captures share: each stream that multiplies costs a workspace, 32 MiB on Hopper."""
    return torch.cuda.Stream()


def require_cuda(device: torch.device, backend: str) -> None:
    """Raises BackendUnavailable where there are no CUDA graphs."""
    if device.type != "cuda":
        raise BackendUnavailable(f"{backend} needs a CUDA GPU: its step is a CUDA graph, this run is on {device.type}")
