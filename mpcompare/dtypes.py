"""The formats of ``mpcompare/precision.py`` in torch: their dtypes, and rounding to them."""

import torch
from torch import Tensor

from mpcompare.precision import FP32, TF32, Format

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
HALF = (torch.float16, torch.bfloat16)


def torch_dtype(format: Format) -> torch.dtype:
    """Returns the dtype of a tensor that holds numbers of this format: float32 for TF32, which is no dtype."""
    return _DTYPES["fp32" if format == TF32 else format.name]


def dtype_name(dtype: torch.dtype) -> str:
    """``fp32``, ``fp16``, ``bf16``; any other dtype under torch's own name."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def as_complex(dtype: torch.dtype, numbers: Tensor) -> torch.dtype:
    """Returns the dtype of these numbers where real numbers have ``dtype``."""
    return dtype.to_complex() if numbers.is_complex() else dtype


def rounded_to(values: Tensor, format: Format) -> Tensor:
    """Returns floating ``values`` rounded to the nearest number of a format: halfway between two, to the one whose last
    bit is 0; beyond the largest, to inf. Inf and NaN stay as they are. Values in fp64 are rounded to fp32 first, as
    torch's own casts do. The dtype stays; where values are stored in the format, they are returned themselves."""
    if format == TF32:
        return _rounded_to_tf32(values.float()).to(values.dtype)
    return values.to(torch_dtype(format)).to(values.dtype)


def _rounded_to_tf32(values: Tensor) -> Tensor:
    """Returns fp32 values whose last 13 bits are rounded away. A carry goes on into the exponent, even to inf's."""
    dropped = FP32.mantissa_bits - TF32.mantissa_bits
    bits = values.view(torch.int32)
    last = (bits >> dropped) & 1  # the last bit that stays: halfway is rounded up where it is 1
    bits = (bits + (1 << dropped - 1) - 1 + last) & -(1 << dropped)
    return torch.where(values.isnan(), values, bits.view(torch.float32))  # some NaN have only bits that are dropped
