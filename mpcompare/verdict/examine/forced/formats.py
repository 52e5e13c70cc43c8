"""The limits of a format that a layer asks for, such as the least number by which it may divide."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mpcompare.verdict.examine.forced.record import Call, is_real


@contextmanager
def limits_as_recorded(call: Call, dtype: torch.dtype) -> Iterator[None]:
    """A layer that asks for the limits of ``dtype``, as by ``torch.finfo(x.dtype).eps``, is told those of the format
    that its inputs had in a recorded call, while it is entered. Inputs of several formats do not tell which it is."""
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
