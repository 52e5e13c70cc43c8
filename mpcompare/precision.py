"""The precisions: their names, dtypes and unit roundoffs, and the one that ``auto`` stands for."""

import torch

from mpcompare.errors import InputError, check_choice

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def unit_roundoff(precision: str) -> float:
    """Rounding to this precision changes a number by at most this, relatively: 2^-24, 2^-11 or 2^-8."""
    return torch.finfo(DTYPES[precision]).eps / 2


def dtype_name(dtype: torch.dtype) -> str:
    """``fp32``, ``fp16``, ``bf16``; any other dtype under torch's own name."""
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def resolve_precision(precision: str, accepted: tuple[str, ...], device: torch.device, backend: str) -> str:
    """``auto`` becomes fp16 on CUDA and bf16 on a CPU, where torch's fp16 GEMM is 100 times slower, if accepted.

    Raises:
        InputError: an unknown precision, one that this backend does not do, or TF32 without a CUDA device.
    """
    check_choice("precision", precision, ("auto", *DTYPES))
    if precision == "auto":
        preferred = "fp16" if device.type == "cuda" else "bf16"
        return preferred if preferred in accepted else accepted[0]
    if precision not in accepted:
        raise InputError("precision", precision, f"backend={backend} accepts one of auto, {', '.join(accepted)}")
    if precision == "tf32" and device.type != "cuda":
        raise InputError("precision", precision, f"needs a CUDA device, this run is on {device.type}")
    return precision
