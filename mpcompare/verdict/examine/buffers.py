"""Buffers after training: the numbers that training left in them, and the formats in which the backend keeps them."""

from typing import Any

from torch import Tensor, nn

from mpcompare.dtypes import dtype_name
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.verdict.examine.numerics import distance, numbers, short_share, sketch
from mpcompare.verdict.judge.buffers import Buffer, Buffers


def buffers_of_backend(network: nn.Module, backend: Any) -> Buffers:
    """Returns the buffers of a backend that training has moved since the initial ``network``. Buffers that it left as
    they were are compared in the first step."""
    initial = dict(network.named_buffers())
    return {
        name: _buffer(name, initial[name], b.detach())
        for name, b in backend.buffers().items()
        if name in initial and _has_moved(initial[name], b.detach())
    }


def _has_moved(initial: Tensor, b: Tensor) -> bool:
    """Returns whether a buffer has other numbers than at first. NaN in the place of NaN is the same."""
    return b.shape != initial.shape or distance({"": initial}, {"": b.to(initial.device)}) != 0


def _buffer(name: str, initial: Tensor, b: Tensor) -> Buffer:
    """Returns a buffer as the findings have it: a whole number as it is, several whole numbers as a fingerprint, and
    other numbers as a sketch. Infinite numbers and NaN count as 0 where the network has no finite number at first, as a
    history that is filled slot by slot."""
    formats = dtype_name(b.dtype), dtype_name(initial.dtype)
    if not (initial.is_floating_point() or initial.is_complex()):
        value = f"{b.item():g}" if b.numel() == 1 else fingerprint({name: b.double().cpu()})
        return Buffer(*formats, whole=value, sketch=sketch({name: b})[name])
    first, b = numbers(initial).to(b.device), numbers(b)
    counts = b.isfinite() if first.shape != b.shape else b.isfinite() | first.isfinite()
    values, found = b[counts & (b != 0)], sketch({name: b.masked_fill(~counts, 0)})[name]
    return Buffer(*formats, sketch=found, elements=len(values), short=short_share(values))
