"""The formats of ``mpcompare/precision.py`` in torch: their dtypes."""

import torch

from mpcompare.precision import PRECISIONS, TF32, Format

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def torch_dtype(format: Format) -> torch.dtype:
    """Returns the dtype of a tensor that holds numbers of this format: float32 for TF32, which is no dtype."""
    return _DTYPES["fp32" if format == TF32 else format.name]


def dtype_name(dtype: torch.dtype) -> str:
    """``fp32``, ``fp16``, ``bf16``; any other dtype under torch's own name."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


DTYPES = {name: torch_dtype(precision.storage) for name, precision in PRECISIONS.items()}


def unit_roundoff(precision: str) -> float:
    """Rounding to the precision's storage changes a number by at most this, relatively: 2^-24, 2^-11 or 2^-8."""
    return PRECISIONS[precision].storage.unit_roundoff
