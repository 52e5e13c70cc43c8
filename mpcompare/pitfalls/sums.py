"""Long sums of equal numbers: they stop where an addend is below half the gap above the sum."""

import torch
from torch import Tensor

from mpcompare.pitfalls.grid import gap, stored
from mpcompare.pitfalls.pitfall import Line, in_formats, number, pitfall

ADDEND, ADDENDS = 0.1, 10_000


def one_by_one(dtype: torch.dtype, accumulate_dtype: torch.dtype) -> Tensor:
    """Returns the sum, in ``dtype``, of 10,000 times 0.1 in ``dtype``, added one after the other to a sum in
    ``accumulate_dtype``."""
    total, addend = stored(0.0, accumulate_dtype), stored(ADDEND, dtype).to(accumulate_dtype)
    for _ in range(ADDENDS):
        total += addend
    return total.to(dtype)


@pitfall(
    "Is 10,000 times 0.1 a thousand?",
    "Sum in fp32 and round once, as matrix products and torch.sum do.",
    "Higham, The Accuracy of Floating Point Summation, SIAM J. Sci. Comput. 14(4), 1993",
)
def sums() -> list[Line]:
    stops = in_formats(lambda dtype: one_by_one(dtype, dtype))
    halves = {name: gap(stops[name], dtype) / 2 for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))}
    in_bf16 = float(stored(ADDEND, torch.bfloat16))
    return [
        Line(
            "one by one, the sum in the format",
            stops,
            f"Half the gap is {number(halves['fp16'])} at {number(stops['fp16'])} in fp16 and {number(halves['bf16'])} "
            f"at {number(stops['bf16'])} in bf16, more than {ADDEND}: the sum stops there.",
        ),
        Line(
            "one by one, the sum in fp32, then rounded",
            in_formats(lambda dtype: one_by_one(dtype, torch.float32)),
            f"{ADDEND} in bf16 is {number(in_bf16)}; fp32 sums that to {number(in_bf16 * ADDENDS)} but for its own "
            "rounding.",
        ),
        Line(
            "torch.sum",
            in_formats(lambda dtype: torch.full((ADDENDS,), ADDEND, dtype=dtype).sum()),
            "torch sums in fp32, in several parts that it adds at the end, so that the rounding errors stay small.",
        ),
    ]
