"""Rounding at random: how many weights went to the farther one of their two neighbours, and how many should have."""

import torch
from torch import Tensor

DIGITS = 8  # of bf16
HALF = 0.45  # of a gap: an error of the exact number does not decide where it went


def far_from(exact: Tensor, new: Tensor) -> tuple[int, float]:
    """Returns the number of elements of ``new`` that are beyond half a gap of bf16 from the ``exact`` ones, and the
    number that rounding at random leaves there on average: it takes the farther neighbour as often as the exact number
    is away from the nearer one, in gaps. Both float64; numbers next to a neighbour, and halfway, are left out."""
    gap = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - DIGITS)
    nearer = (exact - exact.div(gap).round_().mul_(gap)).abs_().div_(gap)
    counts = nearer < HALF
    far = counts & ((new - exact).abs_() > gap / 2)
    return int(far.sum()), float(nearer[counts].sum())
