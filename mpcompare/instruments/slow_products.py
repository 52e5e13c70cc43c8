"""Products of 16-bit numbers on a CPU without instructions for them. torch has no fast kernels there, and a step of a
large network may take minutes."""

import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from mpcompare.dtypes import torch_dtype
from mpcompare.numerals import short
from mpcompare.precision import FP32, Format

SIZE = 256  # the number of rows and columns of the matrices
FLOPS = 3 * 2 * SIZE**3  # of a linear layer, forward and backward
SLOWER = 8.0  # fp32 has so few times the speed where a CPU has such instructions, or nearly
LONG_S = 10.0  # a step that is shorter than this needs no warning
TIMES = 8  # products that are timed: while another program computes, many of them wait for it


def warning(number_format: Format, flops: Callable[[], int]) -> str:
    """Returns a line on a step that will take long because torch's products of this format are slow on this CPU. Empty
    where they are not. ``flops`` returns the operations of the step's products, and is asked only on such a CPU."""
    seconds, of_fp32 = seconds_of_products(number_format), seconds_of_products(FP32)
    slower = seconds / of_fp32
    if slower < SLOWER or (step_s := flops() / FLOPS * seconds) < LONG_S:
        return ""
    return (
        f"torch multiplies {number_format.name} numbers {short(slower, 2)} times slower than fp32 numbers on this CPU, "
        f"so a step may take {short(step_s, 2)} s; a smaller task.batch_size and fewer train.steps take less"
    )


def seconds_of_products(number_format: Format) -> float:
    """Returns the shortest of :data:`TIMES` times of a linear layer, forward and backward on the CPU, in seconds."""
    x, w = (torch.ones(SIZE, SIZE, dtype=torch_dtype(number_format), requires_grad=True) for _ in range(2))
    times = []
    for _ in range(TIMES):
        began = time.perf_counter()
        F.linear(x, w).backward(w.detach())
        times.append(time.perf_counter() - began)
    return min(times)
