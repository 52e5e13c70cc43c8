"""Neighbours, gaps and counts of numbers, compared with the formats of precision.py and torch's own limits."""

import math

import pytest
import torch

from mpcompare.dtypes import torch_dtype
from mpcompare.pitfalls.grid import count, gap, next_above, next_below, positive_numbers, smallest, stored
from mpcompare.precision import BF16, FP16, FP32

FORMATS = (FP16, BF16, FP32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_ends_and_gaps_are_as_in_the_format(format):
    dtype = torch_dtype(format)
    assert smallest(dtype) == format.smallest_subnormal
    assert gap(1.0, dtype) == 2 * format.unit_roundoff
    assert next_above(next_below(format.maximum, dtype), dtype) == format.maximum
    assert next_above(format.maximum, dtype) == math.inf
    assert count(1.0, 2.0, dtype) == 2**format.mantissa_bits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_neighbours_are_torchs(dtype):
    for value in (2.0**-24, 0.125, 1.0, 255.0, 32768.0):
        assert next_above(value, dtype) == torch.nextafter(stored(value, dtype), stored(math.inf, dtype))
        assert next_below(value, dtype) == torch.nextafter(stored(value, dtype), stored(0.0, dtype))


@pytest.mark.parametrize("dtype", FP8)
def test_all_numbers_of_8_bits(dtype):
    limits = torch.finfo(dtype)
    numbers = positive_numbers(smallest(dtype), limits.max, dtype)
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).double()
    assert numbers.tolist() == sorted(codes[codes.isfinite() & (codes > 0)].tolist())
    assert count(smallest(dtype), limits.max, dtype) == len(numbers) - 1


def test_fp8s_limits():
    e4m3, e5m2 = FP8
    assert (torch.finfo(e4m3).max, smallest(e4m3), gap(1.0, e4m3)) == (448.0, 2.0**-9, 2.0**-3)
    assert (torch.finfo(e5m2).max, smallest(e5m2), gap(1.0, e5m2)) == (57344.0, 2.0**-16, 2.0**-2)
