"""All parameters in one buffer, so that a pass over all of them is one launch, in a layout that suits matrix products.

In 16 bits rows start a multiple of 16 bytes apart and tensors a multiple of 256 bytes: the fastest kernels of cuBLAS
need that. The elements between them are padding, which is 0 and stays 0.
"""

from itertools import pairwise

import torch
from torch import Tensor

from mpcompare.tasks.task import Params

ROW, SECTION = 8, 128  # elements


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def row_elements(columns: int) -> int:
    """Returns the elements from the start of a row to the start of the next."""
    return _up(columns, ROW)


def sections(sizes: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Returns start and length in elements, padding included, of ``W1 b1 W2 b2 ...`` in their order."""
    places, start = {}, 0
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        for name, count in ((f"W{layer}", fan_in * row_elements(fan_out)), (f"b{layer}", fan_out)):
            places[name] = start, _up(count, SECTION)
            start += places[name][1]
    return places


def elements(sizes: tuple[int, ...]) -> int:
    """Returns the elements of the whole buffer."""
    return sum(length for _, length in sections(sizes).values())


def views(flat: Tensor, sizes: tuple[int, ...], begin: int = 0) -> Params:
    """Returns the parameters ``W1, b1, ...`` as views of ``flat``, which begins at the element ``begin`` of the whole
    buffer; the parameters before that element are left out."""
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
    """Returns a zero matrix ``[rows, columns]`` outside of the buffer, whose rows are padded in the same way."""
    return torch.zeros(rows, row_elements(columns), dtype=dtype, device=device)[:, :columns]
