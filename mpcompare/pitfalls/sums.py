"""Long sums of equal numbers: they stop where an addend is below half the gap above the sum. And two ways to add small
numbers in 16 bits after all: stochastic rounding, and Kahan's compensated sum."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mpcompare.pitfalls.grid import gap, stored
from mpcompare.pitfalls.pitfall import Line, in_formats, number, pitfall

# Start, addend, additions: the sum of this pitfall, and the updates of a weight.
SUM, UPDATES = (0.0, 0.1, 10_000), (1.0, 1e-4, 1000)
ZAMIRAI = "Zamirai et al., Revisiting BFloat16 Training, arXiv 2010.06192"
WEIGHTS = 1000  # the number of weights that are updated side by side with stochastic rounding


def added(start: float, addend: float, additions: int, dtype: torch.dtype) -> Tensor:
    """Returns a sum that is rounded to nearest after each addition; the addend is rounded to ``dtype``, too."""
    total, x = stored(start, dtype), stored(addend, dtype)
    for _ in range(additions):
        total += x
    return total


@pitfall(
    "Is 10,000 times 0.1 a thousand?",
    "Sum in fp32 and round once, as matrix products and torch.sum do.",
    "Higham, The Accuracy of Floating Point Summation, SIAM J. Sci. Comput. 14(4), 1993",
)
def sums() -> Iterator[Line]:
    _, addend, additions = SUM

    def in_fp32(dtype: torch.dtype) -> Tensor:
        return added(0.0, float(stored(addend, dtype)), additions, torch.float32).to(dtype)

    stops = in_formats(partial(added, *SUM))
    halves = {name: gap(stops[name], dtype) / 2 for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))}
    in_bf16 = float(stored(addend, torch.bfloat16))
    yield Line(
        "one by one, the sum in the format",
        stops,
        f"Half the gap is {number(halves['fp16'])} at {number(stops['fp16'])} in fp16 and {number(halves['bf16'])} "
        f"at {number(stops['bf16'])} in bf16, more than {addend}: the sum stops there.",
    )
    yield Line(
        "one by one, the sum in fp32, then rounded",
        in_formats(in_fp32),
        f"{addend} in bf16 is {number(in_bf16)}; fp32 sums that to {number(in_bf16 * additions)} but for its own "
        "rounding.",
    )
    yield Line(
        "torch.sum",
        in_formats(lambda dtype: torch.full((additions,), addend, dtype=dtype).sum()),
        "torch sums in fp32, in several parts that it adds at the end, so that the rounding errors stay small.",
    )


def stochastically_rounded(values: Tensor, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Returns each value rounded to one of its two neighbours in ``dtype``, the likelier the nearer it is.

    With the gap d between neighbours, a value that lies e beyond the one nearer to 0 goes to the other with probability
    e / d, so that the mean of the result is the value (Gupta et al., arXiv 1502.02551). This is done on the bits: a
    random number is added to the bits that ``dtype`` does not have, and these bits are cut off.

    Args:
        values: in fp64, each 0 or within the normal numbers of ``dtype``.
    """
    dropped = 52 + round(math.log2(torch.finfo(dtype).eps))  # fp64 stores 52 bits after the leading 1
    bits = values.view(torch.int64) + torch.randint(1 << dropped, values.shape, generator=random)
    return (bits & -(1 << dropped)).view(torch.float64).to(dtype)


def added_stochastically(start: float, addend: float, additions: int, dtype: torch.dtype) -> Tensor:
    """Returns sums [1000] in ``dtype``: each addition is exact but for one stochastic rounding."""
    random = torch.Generator().manual_seed(0)
    totals, exact = torch.full((WEIGHTS,), start, dtype=dtype), stored(addend, dtype).double()
    for _ in range(additions):
        totals = stochastically_rounded(totals.double() + exact, dtype, random)
    return totals


def added_with_kahan(start: float, addend: float, additions: int, dtype: torch.dtype) -> Tensor:
    """Returns a sum whose every operation is rounded to ``dtype``: the error of each addition is subtracted in the
    next."""
    total, error, x = stored(start, dtype), stored(0.0, dtype), stored(addend, dtype)
    for _ in range(additions):
        y = x - error
        increased = total + y
        error = (increased - total) - y  # the part of y that the addition lost, negative
        total = increased
    return total


@pitfall(
    "Does rounding at random help?",
    "Use it where there is no memory for fp32 weights; a weight is right on average only.",
    f"Gupta et al., arXiv 1502.02551; {ZAMIRAI}",
)
def stochastic_rounding() -> Iterator[Line]:
    updated = {dtype: added_stochastically(*UPDATES, dtype).double() for dtype in (torch.float16, torch.bfloat16)}
    spread = {dtype: number(float(weights.std())) for dtype, weights in updated.items()}
    yield _to_nearest()
    yield Line(
        "1 + 1,000 times 1e-4: mean of 1,000 sums",
        in_formats(lambda dtype: added_stochastically(*UPDATES, dtype).double().mean()),
        f"An update moves the weight rarely, by a whole gap; the weights spread by {spread[torch.float16]} in fp16 "
        f"and {spread[torch.bfloat16]} in bf16 (standard deviation).",
    )
    yield Line(
        "10,000 times 0.1: mean of 1,000 sums",
        in_formats(lambda dtype: added_stochastically(*SUM, dtype).double().mean()),
        f"{number(SUM[1])} itself is rounded first, to {number(float(stored(SUM[1], torch.float16)))} in fp16 and "
        f"{number(float(stored(SUM[1], torch.bfloat16)))} in bf16; the sum goes on to the end.",
    )


@pitfall(
    "Does a compensated sum help?",
    "Use it where all computing is in 16 bits: weight and lost part are 16 bits each, as large as an fp32 weight.",
    f"Kahan, Comm. ACM 8(1), 1965; {ZAMIRAI}",
)
def kahan() -> Iterator[Line]:
    total, addend = in_formats(partial(added_with_kahan, *SUM)), float(stored(SUM[1], torch.bfloat16))
    yield _to_nearest()
    yield Line(
        "1 + 1,000 times 1e-4, with Kahan",
        in_formats(partial(added_with_kahan, *UPDATES)),
        "The part that an addition loses is kept in a second number, until it is enough to move the sum.",
    )
    yield Line(
        "10,000 times 0.1, with Kahan",
        total,
        f"{number(SUM[2] * addend)} is the exact sum in bf16, of {number(addend)} each; the compensated one is "
        f"within a gap of it, {number(gap(total['bf16'], torch.bfloat16))}.",
    )


def _to_nearest() -> Line:
    """Returns the line that both are compared with."""
    nearest = in_formats(partial(added, *UPDATES))
    return Line(
        "1 + 1,000 times 1e-4, to nearest",
        nearest,
        f"Rounded to nearest, the weight stays {number(nearest['fp16'])} in fp16 and {number(nearest['bf16'])} in "
        "bf16: an update is less than half a gap.",
    )
