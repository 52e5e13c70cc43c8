"""The formats in torch: their dtypes, and rounding to them, against the definition in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.backends import CUDA

from mpcompare.dtypes import dtype_name, rounded_to, torch_dtype
from mpcompare.precision import BF16, FORMATS, FP16, FP32, TF32

EVERY = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
INF = math.inf


def test_every_format_has_a_dtype_of_its_size_that_is_named_after_it():
    for format in FORMATS.values():
        assert torch_dtype(format).itemsize == format.bytes
        assert dtype_name(torch_dtype(format)) == ("fp32" if format is TF32 else format.name)
    assert dtype_name(torch.float64) == "float64"
    assert dtype_name(torch.int64) == "int64"


def nearest(x, format):
    """Returns ``x`` rounded to a multiple of the gap between the format's numbers; Python rounds halves to even."""
    if not math.isfinite(x) or x == 0:
        return x
    smallest_exponent = math.frexp(format.smallest_normal)[1]
    gap = 2.0 ** (max(math.frexp(x)[1], smallest_exponent) - 1 - format.mantissa_bits)
    rounded = round(x / gap) * gap
    return math.copysign(rounded if abs(rounded) <= format.maximum else INF, x)


def assert_rounded(values, format):
    rounded = rounded_to(values, format)
    expected = torch.tensor([nearest(x, format) for x in values.tolist()], dtype=torch.float64)
    assert (rounded.dtype, rounded.shape) == (values.dtype, values.shape)
    assert torch.equal(rounded.double().signbit(), expected.signbit())  # the signs of zeros, too
    assert torch.equal(rounded.double(), expected)
    assert torch.equal(rounded_to(rounded, format), rounded)


@EVERY
@given(x=st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_rounding_is_to_the_nearest_number_of_the_format(format, x):
    assert_rounded(torch.tensor(x), format)


@EVERY
@given(mantissa=st.integers(0, 2**24 - 1), exponent=st.integers(-175, 106), sign=st.sampled_from([1, -1]))
def test_numbers_of_every_size_round_to_the_nearest_of_the_format(format, mantissa, exponent, sign):
    assert_rounded(torch.tensor([sign * math.ldexp(mantissa, exponent)], dtype=torch.float64).float(), format)


@pytest.mark.parametrize("format", [TF32, FP16, BF16])
def test_ties_go_to_the_even_neighbour(format):
    u = format.unit_roundoff
    just = 2.0**-23  # the gap of fp32 next to 1
    x = torch.tensor([1 + u, 1 + 3 * u, 1 + u + just, 1 + u - just, 1 + 3 * u - just, 2 - u, 2 - u - just])
    expected = torch.tensor([1, 1 + 4 * u, 1 + 2 * u, 1, 1 + 2 * u, 2, 2 - 2 * u])
    for sign in (1, -1):
        assert torch.equal(rounded_to(sign * x, format), sign * expected)


@pytest.mark.parametrize("format", [TF32, FP16, BF16])
def test_what_is_too_large_becomes_inf_from_half_a_gap_beyond_the_maximum_on(format):
    first = format.maximum * (1 + format.unit_roundoff / (2 - 2 * format.unit_roundoff))  # tie: even is the next power
    x = torch.tensor([format.maximum, first, -first, INF, -INF])
    assert rounded_to(x, format).tolist() == [format.maximum, INF, -INF, INF, -INF]
    below = torch.nextafter(x[1], torch.tensor(0.0))
    assert rounded_to(below, format).item() == format.maximum


@EVERY
def test_subnormal_numbers_are_rounded_to_multiples_of_the_smallest(format):
    tiny = format.smallest_subnormal
    x = torch.tensor([0.0, -0.0, tiny, 3 * tiny, -5 * tiny, format.smallest_normal])
    assert torch.equal(rounded_to(x, format), x)
    assert torch.equal(rounded_to(x, format).signbit(), x.signbit())
    if format is not FP32:
        between = torch.tensor([0.5 * tiny, 1.5 * tiny, 2.5 * tiny, 0.501 * tiny, format.smallest_normal - tiny / 2])
        assert rounded_to(between, format).tolist() == [0.0, 2 * tiny, 2 * tiny, tiny, format.smallest_normal]


@EVERY
def test_a_nan_stays_one_whatever_its_bits(format):
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7F801FFF, 0x7FFFFFFF, -1, -0x7FFFFF])
    nans = bits.to(torch.int32).view(torch.float32)
    assert nans.isnan().all()
    assert rounded_to(nans, format).isnan().all()
    if format in (FP32, TF32):
        assert torch.equal(rounded_to(nans, format).view(torch.int32), bits.to(torch.int32))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@EVERY
def test_values_keep_their_dtype_their_shape_and_their_layout_and_are_not_written(device, dtype, format):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(device, dtype).t()
    before = x.clone()
    rounded = rounded_to(x, format)
    assert (rounded.dtype, rounded.shape, rounded.device) == (x.dtype, x.shape, x.device)
    assert torch.equal(x, before)
    assert torch.equal(rounded.cpu().double(), torch.tensor(
        [[nearest(each, format) for each in row] for row in x.cpu().double().tolist()], dtype=torch.float64
    ))  # fmt: skip
    if format is FP32 and dtype is torch.float32:
        assert rounded is x
