"""The answers that a replayed layer gets as the recorded layer did, besides its operands.

A layer may ask for the limits of a format, and it may choose, as a router chooses experts. A rounding does not move
such an answer a little: with another answer the layer computes another function.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpcompare.verdict.examine.forced.choices import along
from mpcompare.verdict.examine.forced.record import Call, is_real


@contextmanager
def as_recorded(call: Call, dtype: torch.dtype) -> Iterator[None]:
    """While it is entered, a layer that is called gets the answers of a recorded call. The replay is in ``dtype``."""
    choices = _Choices(call)
    with _limits(call, dtype), choices if choices.chosen else nullcontext():  # a mode is slow
        yield


@contextmanager
def _limits(call: Call, dtype: torch.dtype) -> Iterator[None]:
    """Answers a question for the limits of ``dtype``, as ``torch.finfo(x.dtype).eps`` is, with the limits of the
    recorded inputs' format. Inputs of several formats do not tell which format it is."""
    formats = {value.dtype for value in call.inputs if is_real(value)}
    if len(formats) != 1:
        yield
        return
    (recorded,), finfo = formats, torch.finfo
    torch.finfo = lambda *asked: finfo(*(recorded if each is dtype else each for each in asked))  # type: ignore
    try:
        yield
    finally:
        torch.finfo = finfo  # type: ignore[misc]


class _Choices(TorchDispatchMode):
    """Takes the numbers that the recorded call chose as the k largest of a row, if they agree with the largest in half
    of the digits. Roundings choose between such numbers. Any other choice stays wrong."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.chosen = [v for v in call.outputs if isinstance(v, Tensor) and v.dtype is torch.int64]
        self.near = call.near

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default:
            return result
        for places in self.chosen:
            if places.shape == result[0].shape:
                again = along(func, args, kwargs, result, places, self.near)
                if again is not result:
                    return again
        return result
