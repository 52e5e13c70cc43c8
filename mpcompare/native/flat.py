"""All parameters in one buffer, so that a pass over all of them is one launch, laid out as matrix products like it.

Rows start a multiple of 16 bytes apart and tensors a multiple of 256 in 16 bits: below that the fastest kernels of
cuBLAS do not apply. What lies between them is padding, which is 0 and stays 0.
"""

from itertools import pairwise

import torch
from torch import Tensor

from mpcompare.tasks.task import Params

ROW, SECTION = 8, 128  # elements


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def row_elements(columns: int) -> int:
    """From the start of a row to the next."""
    return _up(columns, ROW)


def sections(sizes: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Start and length in elements, padding included, of ``W1 b1 W2 b2 ...`` in their order."""
    found, start = {}, 0
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        for name, count in ((f"W{layer}", fan_in * row_elements(fan_out)), (f"b{layer}", fan_out)):
            found[name] = start, _up(count, SECTION)
            start += found[name][1]
    return found


def elements(sizes: tuple[int, ...]) -> int:
    """Of the whole buffer."""
    return sum(length for _, length in sections(sizes).values())


def views(flat: Tensor, sizes: tuple[int, ...], begin: int = 0) -> Params:
    """The parameters by name, those before element ``begin`` left out, where the buffer starts at that element."""
    params: Params = {}
    for name, (start, _) in sections(sizes).items():
        layer = int(name[1:])
        fan_in, fan_out, width = sizes[layer - 1], sizes[layer], row_elements(sizes[layer])
        if start < begin:
            continue
        rest = flat[start - begin :]
        params[name] = rest[:fan_out] if name[0] == "b" else rest[: fan_in * width].view(fan_in, width)[:, :fan_out]
    return params


def matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zero matrix ``[rows, columns]`` of its own with such rows."""
    return torch.zeros(rows, row_elements(columns), dtype=dtype, device=device)[:, :columns]
