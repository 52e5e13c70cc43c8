"""A pitfall: a question, and lines that compute the same in each of three formats."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import SupportsFloat

import torch

from mpcompare.dtypes import torch_dtype
from mpcompare.precision import BF16, FP16, FP32

COMPARED = (FP16, BF16, FP32)


@dataclass(frozen=True)
class Line:
    """One computation and its results."""

    asked: str  # the computation, in a few words
    results: Mapping[str, float]  # its result by the name of the format: fp16, bf16, fp32
    why: str  # one sentence about the results, with the numbers that were computed


@dataclass(frozen=True)
class Pitfall:
    """A question about 16 bits."""

    name: str  # the word by which it is chosen on the command line
    question: str
    lines: Callable[[], Iterator[Line]]  # computes the lines, each time that it is called
    instead: str  # what to do about it
    source: str  # a paper or documentation


def pitfall(question: str, instead: str, source: str) -> Callable[[Callable[[], Iterator[Line]]], Pitfall]:
    """Makes a pitfall of a function that yields its lines, under the name of that function."""
    return lambda lines: Pitfall(lines.__name__, question, lines, instead, source)


def in_formats(compute: Callable[[torch.dtype], SupportsFloat]) -> dict[str, float]:
    """Returns the result of ``compute(dtype)`` by the name of each of the three formats."""
    return {format.name: float(compute(torch_dtype(format))) for format in COMPARED}


def number(value: float) -> str:
    """Returns a number as tables and sentences show it: an integer below 10^9 in full, any other with six digits."""
    return f"{value:.0f}" if abs(value) < 1e9 and value == int(value) else f"{value:.6g}"
