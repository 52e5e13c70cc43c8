"""The formats that a replayed network is told when it asks for one."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from mpcompare.verdict.examine.forced.record import Call, is_real


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """While it is entered, numbers that a network makes on its way have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def limits_as_recorded(call: Call, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """While it is entered, ``torch.finfo`` of ``dtype`` returns the limits of the format that the inputs of a call had.
    With other limits a layer would compute another function. Inputs of several formats change nothing."""
    formats = {value.dtype for value in call.inputs if is_real(value)}
    if len(formats) != 1:
        return nullcontext()
    (recorded,), finfo = formats, torch.finfo
    return mock.patch.object(
        torch, "finfo", lambda *asked: finfo(*(recorded if each is dtype else each for each in asked))
    )
