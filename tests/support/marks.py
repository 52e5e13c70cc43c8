"""Marks of parameters: devices that need a GPU, and values that the plain command leaves out."""

from collections.abc import Iterable

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import nn

from mpcompare.backends.torch_model import has_kernel
from mpcompare.precision import BF16

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
)
BF16_LSTM = pytest.mark.skipif(not has_kernel(nn.LSTM, BF16), reason="torch's LSTM has no bf16 on this CPU")


def slow_after(few: int, values: Iterable[object]) -> list[object]:
    """Returns the values of a parameter, all but the first ``few`` of them marked as slow."""
    given = list(values)
    return [*given[:few], *(_slow(value) for value in given[few:])]


def _slow(value: object) -> ParameterSet:
    if isinstance(value, ParameterSet):  # it has a mark already
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.slow])
    return pytest.param(value, marks=pytest.mark.slow)
