"""Numbers as they are printed: few digits, and no power of ten where all digits before the point are as short."""


def short(value: float, digits: int = 4) -> str:
    """Returns ``0.01235``, ``12.35`` and ``58040``: a number in so many digits, and all that it has before the point.

    A time of 5.804e+04 ms, and a loss scale of 1.67772e+07, are hard to read among others. From 1e15 on, where a float
    holds no fractions, it is a power of ten.
    """
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e15 else text
