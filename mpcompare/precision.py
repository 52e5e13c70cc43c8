"""The precisions: their names, and the one that ``auto`` stands for."""

from typing import Protocol

from mpcompare.errors import InputError, check_choice

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


class Device(Protocol):
    """The part of a ``torch.device`` that is asked for here."""

    @property
    def type(self) -> str:
        """``cpu`` or ``cuda``."""


def resolve_precision(precision: str, accepted: tuple[str, ...], device: Device, backend: str) -> str:
    """``auto`` becomes fp16 on CUDA and bf16 on a CPU, where torch's fp16 GEMM is 100 times slower, if accepted.

    Raises:
        InputError: an unknown precision, one that this backend does not do, or TF32 without a CUDA device.
    """
    check_choice("precision", precision, ("auto", *PRECISIONS))
    if precision == "auto":
        preferred = "fp16" if device.type == "cuda" else "bf16"
        return preferred if preferred in accepted else accepted[0]
    if precision not in accepted:
        raise InputError("precision", precision, f"backend={backend} accepts one of auto, {', '.join(accepted)}")
    if precision == "tf32" and device.type != "cuda":
        raise InputError("precision", precision, f"needs a CUDA device, this run is on {device.type}")
    return precision
