"""Positions of a sequence in 16 bits: beyond 256 not every one is a bf16 number."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mpcompare.pitfalls.grid import gap, stored
from mpcompare.pitfalls.pitfall import COMPARED, Line, in_formats, number, pitfall

LENGTH, POSITION = 4096, 1001


def first_missing(dtype: torch.dtype) -> int:
    """Returns the first integer from 0 that is not a number of ``dtype``: one above the power of two whose gap is 2."""
    return next(2**k + 1 for k in range(64) if gap(2.0**k, dtype) > 1)


@pitfall(
    "Are positions above 256 kept?",
    "Keep positions as integers, compute angles in fp32, and round cosine and sine at the end.",
    "Wang et al., When Precision Meets Position, arXiv 2411.13476; Su et al., RoFormer, arXiv 2104.09864",
)
def positions() -> Iterator[Line]:
    digits = ", ".join(f"{format.name} has {format.mantissa_bits + 1}" for format in COMPARED)
    stored_position = in_formats(lambda dtype: stored(POSITION, dtype))

    def angle(dtype: torch.dtype) -> Tensor:
        return stored(POSITION, dtype).cos()

    yield Line(
        "the first position that is not stored",
        in_formats(first_missing),
        f"{digits} significant bits: every integer is there up to 2 to that power.",
    )
    yield Line(
        "different values of positions 0 to 4,095",
        in_formats(lambda dtype: len(torch.arange(LENGTH).to(dtype).unique())),
        f"From 2,048 on bf16's numbers are {number(gap(2048.0, torch.bfloat16))} apart, and so many positions "
        "share one.",
    )
    yield Line(
        "position 1,001 is stored as",
        stored_position,
        f"bf16's neighbours there are {number(gap(stored_position['bf16'], torch.bfloat16))} apart.",
    )
    yield Line(
        "cos(1,001), the fastest angle of RoPE",
        in_formats(angle),
        f"bf16 takes the cosine of {number(stored_position['bf16'])}; exact is {number(float(angle(torch.float64)))}.",
    )
