"""The check of a value, as JSON holds it, against its type."""

from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from mpcompare.errors import InputError, shortened

WORDS = ("inf", "-inf", "nan")  # stand for numbers that JSON does not have
LARGEST = 2**63  # the largest whole number: a record holds counts and bytes, and larger ones are no floats
SHOWN = 60  # characters of a wrong value in a message
NAMES = {
    float: "a number", int: "a whole number", str: "a text", bool: "true or false", dict: "a table", list: "a list",
}  # fmt: skip


def check_type(name: str, value: Any, expected: Any) -> None:
    """Raises InputError, which names the part that is wrong, unless ``value`` is of a type: float (also one of
    ``WORDS``), int, str, bool, Any, a Literal of texts, a TypedDict, a dataclass, or a dict, list or union of these."""
    origin, parts = get_origin(expected) or expected, get_args(expected)
    is_table = is_typeddict(expected) or is_dataclass(expected)
    if expected is Any:
        return
    if origin in (Union, UnionType):
        _check_union(name, value, parts)
        return
    _check_base(name, value, dict if is_table else str if origin is Literal else origin)
    if is_table:
        _check_table(name, value, expected)
    elif origin is dict:
        for key, each in value.items():
            check_type(f"{name}, a key", key, parts[0])
            check_type(f"{name}.{key}", each, parts[1])
    elif origin is list:
        for place, each in enumerate(value):
            check_type(f"{name}[{place}]", each, parts[0])
    elif origin is Literal and value not in parts:
        raise InputError(name, value, f"expected one of {', '.join(parts)}")


def _check_union(name: str, value: object, parts: tuple[Any, ...]) -> None:
    if value is None and NoneType in parts:
        return
    *others, last = (part for part in parts if part is not NoneType)
    if not any(is_of(value, part) for part in others):
        check_type(name, value, last)


def is_of(value: object, expected: Any) -> bool:
    """Returns whether ``value`` is of a type, as :func:`check_type` takes it."""
    try:
        check_type("", value, expected)
    except InputError:
        return False
    return True


def required(table: Any) -> Collection[str]:
    """Returns the keys that a TypedDict or a dataclass always has."""
    if is_typeddict(table):
        return table.__required_keys__
    return [each.name for each in fields(table) if each.default is MISSING]


def _check_table(name: str, value: Any, expected: Any) -> None:
    for key, of_key in get_type_hints(expected).items():
        if key in value:
            check_type(f"{name}.{key}", value[key], of_key)
        elif key in required(expected):
            raise InputError(f"{name}.{key}", "", f"expected {_named(of_key)}, there is none")


def _check_base(name: str, value: object, expected: type) -> None:
    numeric = expected in (int, float)
    fits = isinstance(value, (int, float) if expected is float else expected)
    if numeric:
        fits &= not isinstance(value, bool) and not (isinstance(value, int) and abs(value) >= LARGEST)
        fits |= expected is float and isinstance(value, str) and value in WORDS
    if not fits:
        shown = repr(value) if isinstance(value, str) else str(value)
        raise InputError(name, shortened(shown, SHOWN), f"expected {_named(expected)}")


def _named(expected: Any) -> str:
    parts = get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)
    base = next(each for each in parts if each is not NoneType)
    return NAMES.get(dict if is_typeddict(base) or is_dataclass(base) else get_origin(base) or base, "a value")
