"""Long sums of equal numbers: they stop where an addend is below half the gap above the sum."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mpcompare.pitfalls.grid import gap, stored
from mpcompare.pitfalls.pitfall import Line, in_formats, number, pitfall

# Start, addend, additions: the sum of this pitfall, and the updates of a weight.
SUM, UPDATES = (0.0, 0.1, 10_000), (1.0, 1e-4, 1000)


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
