"""What the device reaches at best: its matrix products and its memory, by torch's own operators on random data."""

from collections.abc import Callable

import numpy as np
import torch

from mpcompare.dtypes import torch_dtype
from mpcompare.instruments import clock as measure
from mpcompare.instruments import machine
from mpcompare.precision import PRECISIONS


def seconds(call: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Seconds a call."""
    clock = measure.clock(device)
    clock.mark()
    for _ in range(calls):
        call()
    clock.mark()
    (ms,) = clock.read()
    return ms / 1e3 / calls


def calls_for(call: Callable[[], object], device: torch.device, block_s: float = 0.005) -> int:
    """How many calls fill a block; one on a CPU, whose clock needs no block. The first call is left out."""
    call()
    return 1 if device.type == "cpu" else max(1, round(block_s / seconds(call, device)))


def median_seconds(call: Callable[[], object], device: torch.device, blocks: int = 9) -> float:
    calls = calls_for(call, device)
    return float(np.median([seconds(call, device, calls) for _ in range(blocks)]))


def matmul_flops(device: torch.device, precision: str, size: int) -> float:
    """Flop/s of ``[size, size] [size, size]``; never of zeros, which are faster."""
    known = PRECISIONS[precision]
    a, b = (torch.randn(size, size, device=device).to(torch_dtype(each)) for each in (known.activation, known.weight))
    out = torch.empty_like(a)
    with machine.tf32(known.uses_tf32):
        return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), device)


def copy_bytes(device: torch.device, megabytes: int) -> float:
    """Bytes/s of a copy within the device's memory, read and written."""
    source = torch.randn(megabytes << 18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)
