"""The ends of a format and the gaps between its numbers: numbers that become 0 or inf, do not move, or share one."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mpcompare.loss_scale import DynamicLossScale
from mpcompare.pitfalls.grid import gap, next_above, next_below, smallest, stored
from mpcompare.pitfalls.pitfall import COMPARED, Line, in_formats, number, pitfall
from mpcompare.pitfalls.sums import UPDATES, added

MICIKEVICIUS = "Micikevicius et al., Mixed Precision Training, arXiv 1710.03740"
SCALE = DynamicLossScale().scale
LENGTH, POSITION = 4096, 1001  # of a sequence


@pitfall(
    "What is below 2^-24?",
    "Scale the loss, so that gradients are stored where fp16 has numbers, or store them in bf16.",
    MICIKEVICIUS,
)
def underflow() -> Iterator[Line]:
    least = smallest(torch.float16)
    half = in_formats(lambda dtype: stored(least / 2, dtype))
    between = in_formats(lambda dtype: stored(1.4 * least, dtype))
    off = 100 * abs(between["fp16"] / (1.4 * least) - 1)
    scaled = in_formats(lambda dtype: stored(1e-8 * SCALE, dtype).float() / SCALE)
    yield Line(
        "2^-24 is stored as",
        in_formats(lambda dtype: stored(2.0**-24, dtype)),
        f"{number(least)} is the smallest positive number of fp16; bf16's is {number(smallest(torch.bfloat16))}.",
    )
    yield Line("2^-25 is stored as", half, f"Half of fp16's smallest number is rounded to {number(half['fp16'])}.")
    yield Line(
        "1.4 * 2^-24 is stored as",
        between,
        f"Below 2^-14 fp16's numbers are {number(gap(0.0, torch.float16))} apart: the error here is {off:.0f} %.",
    )
    yield Line(
        "a gradient of 1e-8 is stored as",
        in_formats(lambda dtype: stored(1e-8, dtype)),
        f"It is {number(1e-8 / least)} of fp16's smallest number.",
    )
    yield Line(
        f"1e-8 * {SCALE:.0f}, stored; / {SCALE:.0f} in fp32",
        scaled,
        f"The loss scale lifts it to {number(1e-8 * SCALE)}, above fp16's smallest normal number, "
        f"{number(torch.finfo(torch.float16).tiny)}.",
    )


@pitfall(
    "What is above 65504?",
    "Keep sums, losses and norms in fp32, and skip a step whose gradients hold inf.",
    f"{MICIKEVICIUS}; docs.pytorch.org, notes on numerical accuracy",
)
def overflow() -> Iterator[Line]:
    largest = torch.finfo(torch.float16).max
    last_gap = largest - next_below(largest, torch.float16)
    total = in_formats(lambda dtype: torch.full((1000,), 100.0, dtype=dtype).sum())
    sum_in_fp32 = float(torch.full((1000,), 100.0, dtype=torch.float16).sum(dtype=torch.float32))
    yield Line(
        "65504 + 15",
        in_formats(lambda dtype: added(65504.0, 15.0, 1, dtype)),
        f"{number(largest)} is fp16's largest number, {number(last_gap)} above the one before: less than half of "
        "that is rounded away.",
    )
    yield Line(
        "65504 + 16",
        in_formats(lambda dtype: added(65504.0, 16.0, 1, dtype)),
        f"From {number(largest + last_gap / 2)} on fp16 rounds to inf; bf16 has fp32's range, up to "
        f"{number(torch.finfo(torch.bfloat16).max)}.",
    )
    yield Line(
        "the sum of 1,000 times 100",
        total,
        f"torch sums in fp32 to {number(sum_in_fp32)}, and storing that in fp16 gives {number(total['fp16'])}.",
    )


@pitfall(
    "Does a small update arrive?",
    "Update fp32 master weights, and round copies of them for forward and backward.",
    MICIKEVICIUS,
)
def lost_update() -> Iterator[Line]:
    updated = partial(added, *UPDATES)
    halves = {name: step / 2 for name, step in in_formats(lambda dtype: gap(1.0, dtype)).items()}
    yield Line(
        "1 + 1e-4",
        in_formats(lambda dtype: added(1.0, 1e-4, 1, dtype)),
        f"Half the gap above 1 is {number(halves['fp16'])} in fp16, {number(halves['bf16'])} in bf16 and "
        f"{number(halves['fp32'])} in fp32; less is rounded away.",
    )
    yield Line(
        "1 + 1e-3",
        in_formats(lambda dtype: added(1.0, 1e-3, 1, dtype)),
        f"The next number above 1 is {number(next_above(1.0, torch.float16))} in fp16, and "
        f"{number(next_above(1.0, torch.bfloat16))} in bf16.",
    )
    yield Line(
        "a weight of 1 after 1,000 updates of 1e-4",
        in_formats(updated),
        "Each update is rounded away by itself, so that all of them are.",
    )
    yield Line(
        "the same on an fp32 master, then rounded",
        in_formats(lambda dtype: updated(torch.float32).to(dtype)),
        f"The master reaches {number(float(updated(torch.float32)))}, and is rounded once.",
    )


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
