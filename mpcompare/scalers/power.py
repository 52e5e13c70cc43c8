"""Loss scales in words: most are powers of two."""

import math


def power(scale: float) -> str:
    """Returns a scale as 2^16 if it is a power of two, else as a number."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.6g}"
