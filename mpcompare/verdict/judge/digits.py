"""The digits that 16 bits lose at a layer, in words: which layers should stay in fp32, and why.

A layer should stay in fp32 where one rounding of each of its operands and results is more than sqrt(u) of its output or
its gradient, u being the unit roundoff: half of the digits are gone. fp32 has to keep as much there, or no precision
helps, as where a gradient is exactly 0. A layer should stay in fp32, too, where a result is beyond the format.
"""

import math
from dataclasses import dataclass

from mpcompare.precision import FP32, PRECISIONS

MOST = 0.5  # a larger share is most of the numbers of a tensor
OPERATORS = {
    "square": "squares", "pow": "powers", "mul": "products", "div": "quotients", "add": "sums", "sub": "differences",
    "sum": "sums", "exp": "exponentials", "mm": "matrix products", "addmm": "matrix products", "bmm": "matrix products",
    "convolution": "convolutions", "rsqrt": "reciprocals of roots", "reciprocal": "reciprocals",
}  # fmt: skip


@dataclass(frozen=True)
class Digits:
    """The cost of a precision of 16 bits at one layer, or in the work before it."""

    kind: str  # the class of the layer; empty for the work before one
    output: float = 0.0  # error of its output if each operand and result is rounded once, relative to the output's norm
    # the same error for backward: of the gradients of its parameters as one vector, or of the gradients that it passes
    # down as another, the larger of the two; 0 for the work before a layer
    gradient: float = 0.0
    terms: float = 0.0  # the norm of what is summed over the norm of the output; more than 1 where terms cancel
    gradient_terms: float = 0.0  # the same for the gradient
    loss: float = 0.0  # the change of the loss if its output is rounded once, relative to the loss
    overflow: float = 0.0  # the share of its output, or of the gradient that arrives there, that is beyond the format
    underflow: float = 0.0  # the share of this gradient, with the loss scale, below the format's normal numbers
    operator: str = ""  # the first of its operators with a result beyond the format; empty where there is none
    largest: float = 0.0  # the largest number in that result, times the loss scale in backward
    in_backward: bool = False  # whether that operator is one of backward


def bound(precision: str) -> float:
    """Returns the relative error at which half of the digits of a precision are lost."""
    return math.sqrt(PRECISIONS[precision].unit_roundoff)


def lost(error: float, precision: str) -> float:
    """Returns the number of binary digits that a relative error costs."""
    u = PRECISIONS[precision].unit_roundoff
    return min(max(0.0, math.log2(max(error, u) / u)), -math.log2(u))


def too_few(error: float, precision: str) -> bool:
    """Returns whether more than half of the digits are lost, and fp32 would keep half of them."""
    return error > bound(precision) and not hopeless(error, precision)


def hopeless(error: float, precision: str) -> bool:
    """Returns whether half of the digits were lost in fp32, too."""
    return error * FP32.unit_roundoff > bound(precision) * PRECISIONS[precision].unit_roundoff


def worst_part(digits: Digits, precision: str) -> tuple[str, float, float]:
    """Returns ``output`` or ``gradient``, whichever loses more digits, and its error and its terms. A part that is
    hopeless is left out."""
    parts = [("output", digits.output, digits.terms), ("gradient", digits.gradient, digits.gradient_terms)]
    return max((p for p in parts if not hopeless(p[1], precision)), key=lambda p: p[1], default=("output", 0.0, 0.0))


def advice(digits: Digits, precision: str) -> str:
    """Returns ``keep in fp32``, with what has to come in fp32, too; empty where 16 bits are enough."""
    _, error, terms = worst_part(digits, precision)
    if too_few(error, precision):
        return "keep in fp32, with what it is given" if _cancels(error, terms, precision) else "keep in fp32"
    return "keep in fp32" if digits.operator or digits.overflow else ""


def why(digits: Digits, precision: str) -> str:
    """Returns the reasons for :func:`advice`, and whether a result is nothing but roundings in fp32, too."""
    reasons, largest = [beyond(digits, precision)], f"{PRECISIONS[precision].storage.maximum:g}"
    if digits.overflow:
        reasons.append(f"{percent(digits.overflow)} of its output or its gradient above {largest}")
    part, error, terms = worst_part(digits, precision)
    if too_few(error, precision):
        cancels = f", for it sums what is {terms:.2g} times as large" if _cancels(error, terms, precision) else ""
        reasons.append(f"one rounding is {percent(error)} of its {part}{cancels}")
    if too_few(digits.gradient, precision) and digits.underflow > MOST:
        reasons.append(f"most of the gradient that arrives is below {precision}'s normal numbers")
    for name, each in (("output", digits.output), ("gradient", digits.gradient)):
        if hopeless(each, precision):
            reasons.append(f"its {name} is 0 but for roundings, in fp32 too")
    return "; ".join(filter(None, reasons))


def beyond(digits: Digits | None, precision: str) -> str:
    """Returns ``squares above 65504``; empty where no result is beyond the format."""
    if not digits or not digits.operator:
        return ""
    name = OPERATORS.get(digits.operator, f"results of {digits.operator}")
    return f"{name}{' in backward' if digits.in_backward else ''} above {PRECISIONS[precision].storage.maximum:g}"


def percent(share: float) -> str:
    """Returns ``12 %``, in two digits."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def _cancels(error: float, terms: float, precision: str) -> bool:
    """Returns whether more of an error comes from a layer's operands than from its own results."""
    return PRECISIONS[precision].unit_roundoff * terms / math.sqrt(3) > error / math.sqrt(2)
