"""The digits that 16 bits lose at a layer: a map of the network, which tells what stands behind a doubt in a reference,
and which layers should stay in fp32 (``report/digits_row.py``)."""

from dataclasses import dataclass

from mpcompare.precision import PRECISIONS

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


def beyond(digits: Digits | None, precision: str) -> str:
    """Returns ``squares above 65504``; empty where no result is beyond the format."""
    if not digits or not digits.operator:
        return ""
    name = OPERATORS.get(digits.operator, f"results of {digits.operator}")
    return f"{name}{' in backward' if digits.in_backward else ''} above {PRECISIONS[precision].storage.maximum:g}"


def percent(share: float) -> str:
    """Returns ``12 %``, in two digits."""
    return f"{float(f'{100 * share:.2g}'):g} %"
