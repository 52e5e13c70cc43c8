"""Tools for tests of the native operators: operands, and the bounds of rounding.

u = 2^-24 for each fp32 operation (exp and log: 2 units in the last place, 4 u), then the unit roundoff of the dtype
stored, or half its smallest subnormal.
"""

import math

import pytest
import torch

from mpcompare.dtypes import dtype_name, torch_dtype
from mpcompare.precision import FORMATS

STORED = {name: FORMATS[name] for name in ("fp32", "fp16", "bf16")}  # by the native operators
DTYPES = {name: torch_dtype(format) for name, format in STORED.items()}
UNIT_ROUNDOFF = {name: format.unit_roundoff for name, format in STORED.items()}
CPU = torch.device("cpu")
U = UNIT_ROUNDOFF["fp32"]
HALF_SUBNORMAL = {name: format.smallest_subnormal / 2 for name, format in STORED.items()}
DTYPE = pytest.mark.parametrize("dtype", list(UNIT_ROUNDOFF))


def randn(*shape, dtype="fp32", device=CPU, seed=0, scale=1.0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(device, DTYPES[dtype])


def scalar(value, device, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, device=device)


def at(offset, x):
    """Returns a copy of ``x`` that begins so many elements behind an aligned address, with NaN around it."""
    memory = torch.full((x.numel() + 16,), math.nan, dtype=x.dtype, device=x.device)
    return memory[offset : offset + x.numel()].view(x.shape).copy_(x)


def assert_within(got, exact, fp32_error):
    """``got`` is within fp32_error of ``exact`` before it was rounded to its dtype; overflow is inf."""
    stored = dtype_name(got.dtype)
    rounded = exact.to(got.dtype)
    low, high = (exact - fp32_error).to(got.dtype), (exact + fp32_error).to(got.dtype)
    sure = ~exact.isfinite() | (low.isinf() == high.isinf())  # else fp32's error decides whether it overflows
    assert torch.equal(got.isinf()[sure], rounded.isinf()[sure]), "inf elsewhere"
    assert torch.equal(got.isnan(), rounded.isnan()), "NaN elsewhere"
    bound = fp32_error * 1.01 + UNIT_ROUNDOFF[stored] * exact.abs() + HALF_SUBNORMAL[stored]  # 1.01: second order terms
    finite = rounded.isfinite() & got.isfinite()
    error = (got.double() - exact).abs()
    assert (error <= bound)[finite].all(), f"{(error / bound)[finite].max():.2f} times the bound"
