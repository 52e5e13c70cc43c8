"""The ceilings of a device, measured with torch's own operators on random data: matrix products and memory."""

from collections.abc import Callable

import numpy as np
import torch

from mpcompare.dtypes import torch_dtype
from mpcompare.instruments import clock as clocks
from mpcompare.instruments import fp32_products
from mpcompare.precision import PRECISIONS


def seconds(call: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Returns the seconds that a call takes, as the mean of a block of ``calls``."""
    clock = clocks.clock(device)
    clock.mark()
    for _ in range(calls):
        call()
    clock.mark()
    (ms,) = clock.read()
    return ms / 1e3 / calls


def calls_for(call: Callable[[], object], device: torch.device, block_s: float = 0.005) -> int:
    """Returns the number of calls that fill a block, after one untimed call. A CPU's clock needs no block: 1 there."""
    call()
    return 1 if device.type == "cpu" else max(1, round(block_s / seconds(call, device)))


def median_seconds(call: Callable[[], object], device: torch.device, blocks: int = 9) -> float:
    """Returns the median over ``blocks`` of the seconds that a call takes."""
    calls = calls_for(call, device)
    return float(np.median([seconds(call, device, calls) for _ in range(blocks)]))


def matmul_flops(device: torch.device, precision: str, size: int) -> float:
    """Returns the flop/s of a product of two ``[size, size]`` matrices of random numbers; zeros would be faster."""
    known = PRECISIONS[precision]
    a, b = (torch.randn(size, size, device=device).to(torch_dtype(each)) for each in (known.activation, known.weight))
    out = torch.empty_like(a)
    with fp32_products.tf32(known.uses_tf32):
        return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), device)


def copy_bytes(device: torch.device, megabytes: int) -> float:
    """Returns the bytes/s of a copy within the device's memory, bytes read plus bytes written."""
    source = torch.randn(megabytes << 18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)
