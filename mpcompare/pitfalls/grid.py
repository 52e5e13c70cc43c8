"""The numbers of a floating point dtype: their neighbours, their gaps, and all of them."""

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the number of bytes


def stored(value: float, dtype: torch.dtype) -> Tensor:
    """Returns a scalar of ``dtype``: ``value``, rounded to nearest."""
    return torch.tensor(value, dtype=dtype)


def next_above(value: float, dtype: torch.dtype) -> float:
    """Returns the number of ``dtype`` that follows ``value``, which is one of its numbers, positive or 0, and below
    the largest."""
    return float(_from_bits(_bits(value, dtype) + 1, dtype))


def next_below(value: float, dtype: torch.dtype) -> float:
    """Returns the number of ``dtype`` before ``value``, which is one of its numbers and positive."""
    return float(_from_bits(_bits(value, dtype) - 1, dtype))


def gap(value: float, dtype: torch.dtype) -> float:
    """Returns the distance from ``value``, a number of ``dtype`` that is at least 0, to the next above it."""
    return next_above(value, dtype) - value


def count(low: float, high: float, dtype: torch.dtype) -> int:
    """Returns how many numbers of ``dtype`` are at least ``low`` and below ``high``, both numbers of ``dtype``."""
    return int(_bits(high, dtype) - _bits(low, dtype))


def positive_numbers(low: float, high: float, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of ``dtype`` from ``low`` up to and with ``high``, both positive and its own, ascending, as a
    tensor [n] in fp64."""
    first, last = int(_bits(low, dtype)), int(_bits(high, dtype))
    return _from_bits(torch.arange(first, last + 1), dtype).double()


def smallest(dtype: torch.dtype) -> float:
    """Returns the smallest positive number of ``dtype``, which is subnormal."""
    return next_above(0.0, dtype)


def _bits(value: float, dtype: torch.dtype) -> Tensor:
    """Returns the bits of a number that is at least 0, as an integer: integers have the order of the numbers."""
    return stored(value, dtype).view(_BITS[dtype.itemsize]).long()


def _from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.to(_BITS[dtype.itemsize]).view(dtype)
