"""The formats of ``mpcompare/precision.py`` in torch: their dtypes, and rounding to them."""

import torch

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def unit_roundoff(precision: str) -> float:
    """Rounding to this precision changes a number by at most this, relatively: 2^-24, 2^-11 or 2^-8."""
    return torch.finfo(DTYPES[precision]).eps / 2


def dtype_name(dtype: torch.dtype) -> str:
    """``fp32``, ``fp16``, ``bf16``; any other dtype under torch's own name."""
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
