"""Buffers after training: the numbers that training left in them, and the formats in which the backend keeps them."""

from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.dtypes import dtype_name
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.verdict.examine.numerics import short_share, sketch
from mpcompare.verdict.judge.buffers import Buffer, Buffers


def buffers_of_backend(network: nn.Module, backend: Any) -> Buffers:
    """Returns the buffers of a backend that training has moved since the initial ``network``. Buffers that it left as
    they were are compared in the first step."""
    initial = dict(network.named_buffers())
    return {
        name: _buffer(name, initial[name], b.detach())
        for name, b in backend.buffers().items()
        if name in initial and not torch.equal(initial[name].double(), b.detach().to(initial[name].device).double())
    }


def _buffer(name: str, initial: Tensor, b: Tensor) -> Buffer:
    """Returns a buffer as the findings have it: a whole number as it is, several whole numbers as a fingerprint, and
    other numbers as a sketch."""
    formats = dtype_name(b.dtype), dtype_name(initial.dtype)
    if not initial.is_floating_point():
        value = f"{b.item():g}" if b.numel() == 1 else fingerprint({name: b.double().cpu()})
        return Buffer(*formats, whole=value, sketch=sketch({name: b})[name])
    values = b[b != 0]
    return Buffer(*formats, sketch=sketch({name: b})[name], elements=len(values), short=short_share(values))
