"""Marks of parameters: devices that need a GPU, and values that the plain command leaves out."""

from collections.abc import Iterable, Sequence
from itertools import product

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


def slow_rows(rows: Iterable[Sequence[object]]) -> list[ParameterSet]:
    """Returns rows of parameters, a value of each parameter in a row, all of them marked as slow."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def diagonal(few: int | None = None, /, **values: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrizes a test with each combination of the values of parameters. A diagonal through all combinations has
    each value at least once. The other combinations are marked as slow, and so is all but a ``few`` of the diagonal."""
    longest = max(map(len, values.values()))
    quick = {tuple(i % len(each) for each in values.values()) for i in range(longest if few is None else few)}
    cases = []
    for pairs in product(*map(enumerate, values.values())):
        at, case = zip(*pairs, strict=True)
        cases.append(pytest.param(*case) if at in quick else _slow(pytest.param(*case)))
    return pytest.mark.parametrize(tuple(values), cases)


def _slow(value: object) -> ParameterSet:
    if isinstance(value, ParameterSet):  # it has a mark already
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.slow])
    return pytest.param(value, marks=pytest.mark.slow)
