"""Numbers as they are printed: few digits, and no power of ten where all digits before the point are as short."""


def short(value: float, digits: int = 4) -> str:
    """Returns a number in so many digits, with all its digits before the point: ``0.01235``, ``12.35``, ``58044``.

    A time of 5.804e+04 ms and a loss scale of 1.67772e+07 are hard to read among others. Numbers from 1e15 on have a
    power of ten.
    """
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e15 else text


def digits_of(value: float) -> int:
    """Returns how many digits a number has in fp32: 1 for 0.05, and 7 for 1 / 3."""
    return len(f"{value:.6e}".partition("e")[0].replace(".", "").strip("-0"))


def as_ratio(value: float) -> str:
    """Returns a ratio with two digits after the point, and a small one with its first two: ``1.38``, ``0.0031``."""
    return f"{value:.2g}" if value < 0.095 else f"{value:.2f}"
