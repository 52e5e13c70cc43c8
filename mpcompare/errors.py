"""What a user can get wrong, said in one line: the field, its value, what is accepted."""

import math
from collections.abc import Iterable


class InputError(ValueError):
    """A value, file or tool that the user can change. The message is one line and complete without a traceback."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(" ".join(f"{field}={value}: {expected}".split()))


def check_whole(field: str, value: object, at_least: int) -> None:
    """Raises InputError unless ``value`` is an integer of ``at_least`` or more (a bool or a float is not)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise InputError(field, value, f"expected a whole number of at least {at_least}")


def check_number(field: str, value: object, above: float, below: float = math.inf) -> None:
    """Raises InputError unless ``value`` is a finite number in the open interval (above, below)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < below:
        expected = f"expected a finite number above {above:g}"
        raise InputError(field, value, expected + (f" and below {below:g}" if below < math.inf else ""))


def check_choice(field: str, value: object, accepted: Iterable[str]) -> None:
    """Raises InputError unless ``value`` is one of ``accepted``."""
    if value not in (choices := list(accepted)):
        raise InputError(field, value, f"expected one of {', '.join(choices)}")
