"""Errors of a user, said in one line: the field, its value, what is accepted."""

import difflib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

# The words of torch's RuntimeErrors on memory: from its allocator, the system, C++.
NO_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc")

T = TypeVar("T")

SHOWN = 400  # characters of a value: a tensor has thousands


class InputError(ValueError):
    """A value, file or tool that the user can change. The message is one line and complete without a traceback."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(one_line(f"{field}={shortened(str(value), SHOWN)}: {expected}"))

    @classmethod
    def of(cls, line: str) -> "InputError":
        """Returns the error that another process has said in one line."""
        error = cls.__new__(cls)
        ValueError.__init__(error, line)
        return error


def shortened(text: str, most: int) -> str:
    """Returns a text, or its first characters where it has more than ``most``."""
    return text if len(text) <= most else f"{text[:most]}..."


def one_line(text: str) -> str:
    """Returns a text as one line, and any character that is not printed as its escape: an ESC steers a terminal."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def first_line(error: BaseException) -> str:
    """Returns the error's class and the first line of its message."""
    return one_line(f"{type(error).__name__}: {error}".splitlines()[0])


def in_full(error: BaseException) -> str:
    """Returns the error's class and its whole message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def out_of_memory(error: BaseException) -> bool:
    """Returns whether torch, on a CPU or a GPU, or Python has run out of memory."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")  # torch takes seconds to import, and raises nothing before it is imported
    on_cpu = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return on_cpu or (torch is not None and isinstance(error, torch.OutOfMemoryError))


def want_of_memory(error: BaseException) -> str | None:
    """Returns one line that says what to do where an error says that memory has run out; else None."""
    if out_of_memory(error):
        return f"out of memory, try a smaller task.batch_size or task.model ({first_line(error)})"
    return None


class BackendUnavailable(Exception):  # noqa: N818 - it is a cell of the table, not a fault
    """A backend cannot be had here, or cannot train this kind of network. The reason is one line."""


def fail(*messages: str) -> NoReturn:
    """Ends the program with a line on stderr for each different message, and exit code 2."""
    for message in dict.fromkeys(map(one_line, messages)):
        print(f"mpcompare: error: {message}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def fails_on_input_errors() -> Iterator[None]:
    """Ends the program with the line of an InputError that is raised inside."""
    try:
        yield
    except InputError as error:
        fail(str(error))


def check_whole(field: str, value: object, at_least: int, at_most: float = math.inf) -> None:
    """Raises InputError unless ``value`` is an integer from ``at_least`` to ``at_most`` (a bool or a float is not)."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        limit = f" and at most {at_most}" if at_most < math.inf else ""
        raise InputError(field, value, f"expected a whole number of at least {at_least}{limit}")


def check_every(field: str, value: object) -> None:
    """Raises InputError unless ``value`` is None, or an integer of at least 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InputError(field, value, "expected a whole number of at least 1, or null")


def check_number(
    field: str, value: object, above: float = -math.inf, below: float = math.inf, at_least: float = -math.inf
) -> None:
    """Raises InputError unless ``value`` is a finite number in the open interval (above, below), and at least
    ``at_least``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < below or value < at_least:
        limit = f"above {above:g}" if above > -math.inf else f"of at least {at_least:g}"
        limit += f" and below {below:g}" if below < math.inf else ""
        raise InputError(field, value, f"expected a finite number {limit}")


def check_flag(field: str, value: object) -> None:
    """Raises InputError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise InputError(field, value, "expected true or false")


def check_choice(field: str, value: object, accepted: Iterable[str]) -> None:
    """Raises InputError unless ``value`` is one of ``accepted``."""
    if value not in (choices := list(accepted)):
        raise InputError(field, value, f"expected one of {', '.join(choices)}{did_you_mean(value, choices)}")


def fault_of_call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> str | None:
    """Returns the reason why a function cannot take these arguments; None where it can, or has no known signature."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return None


def result_of(field: str, name: str, function: Callable[..., T], /, *arguments: Any) -> T:
    """Returns what a user's function returns. Raises InputError where it raises an error, or ends the program; the
    message says where."""
    try:
        return function(*arguments)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        ended = isinstance(error, SystemExit)
        what = f"calls sys.exit({error})" if ended else f"raises {type(error).__name__}: {error}"
        raise InputError(field, name, f"{what} ({at.filename}, line {at.lineno})") from error


def did_you_mean(word: object, accepted: Iterable[str]) -> str:
    """Returns `` (did you mean X?)`` where ``word`` is nearly X, one of ``accepted``; else an empty string."""
    lower = {each.lower(): each for each in accepted}
    near = difflib.get_close_matches(str(word).lower(), list(lower), n=1)
    return f" (did you mean {lower[near[0]]}?)" if near else ""
