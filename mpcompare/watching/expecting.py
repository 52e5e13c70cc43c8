"""Facts that are expected: given by name, or as a card that was saved."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from mpcompare.errors import InputError, did_you_mean
from mpcompare.numerals import short
from mpcompare.precision import meant_precision
from mpcompare.records import write_atomically

KEPT_APART = (  # facts of one look, and no property of the loop
    "updates", "skipped", "clipped_updates", "scales", "micro_batch_labels", "order", "gradient_norms",
    "backwards_left_out", "updates_before",
)  # fmt: skip
WORDS = {
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "autocast": ("none", "bf16", "fp16"),
    "clip_place": ("after backward", "before unscaling", "after unscaling"),
}  # the values of facts that have few of them
OF_LOSSES = ("loss", "micro_batch_weights", "micro_batch_labels")  # missing where no loss was replayed
MOST = 4  # names that are written out
NOT_SEEN = "not known: no layer was seen"
NOT_BOUND = "not known: a norm was taken, and no gradient was clipped to it"


def one(values: Sequence[Any]) -> Any:
    """Returns the one value of a list of equal values, else the list; None for an empty list."""
    if not values:
        return None
    return values[0] if all(v == values[0] for v in values) else list(values)


def by_value(values: Mapping[str, Any]) -> Any:
    """Returns the one value of all names. Else returns by value its names, or their number where they are many."""
    kinds: dict[Any, list[str]] = {}
    for name, value in values.items():
        kinds.setdefault(value, []).append(name)
    if len(kinds) <= 1:
        return next(iter(kinds), None)
    return {said(kind): names if len(names) <= MOST else len(names) for kind, names in kinds.items()}


def said(value: Any) -> str:
    """Returns a fact in words."""
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, float):
        return short(value, 6)
    if isinstance(value, Mapping):
        names = any(isinstance(v, str) for each in value.values() if isinstance(each, list) for v in each)
        return _cut([f"{name}: {said(each)}" for name, each in value.items()], "; " if names else ", ")
    if isinstance(value, (list, tuple)):
        parts = [f"[{said(each)}]" if isinstance(each, (list, tuple)) else said(each) for each in value]
        return _cut(parts, "; " if any(isinstance(each, Mapping) for each in value) else ", ")
    return str(value)


def _cut(parts: Sequence[str], between: str) -> str:
    return between.join(parts[:8]) + (f" and {len(parts) - 8} more" if len(parts) > 8 else "")


def save(facts: Mapping[str, Any], file: str | Path) -> None:
    """Writes a card, sorted, a fact a line or more, so that two cards can be compared line by line."""
    text = json.dumps({"mpcompare": "watch", "facts": facts}, indent=1, sort_keys=True) + "\n"
    try:
        write_atomically(Path(file), lambda unfinished: unfinished.write_text(text))
    except OSError as error:
        raise InputError("watch: save", str(file), f"cannot be written ({error.strerror})") from None


def read(file: str | Path) -> dict[str, Any]:
    """Returns the facts of a card.

    Raises:
        InputError: the file is no card.
    """
    try:
        document = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise InputError("watch: expect", str(file), f"cannot be read as a card ({error})") from None
    is_card = isinstance(document, dict) and document.get("mpcompare") == "watch"
    if not is_card or not isinstance(document.get("facts"), dict):
        raise InputError("watch: expect", str(file), "is no card that seen.save(file) wrote")
    return dict(document["facts"])


def differences(facts: Mapping[str, Any], expect: Mapping[str, Any] | str | Path) -> list[str]:
    """Returns the facts that are not as expected, a line each.

    Raises:
        InputError: a fact's name is unknown, a fact cannot have its value, or the file is no card.
    """
    if not isinstance(expect, (Mapping, str, Path)):
        raise InputError("watch: expect", expect, "expected facts by name, or a file that seen.save(file) wrote")
    __tracebackhide__ = True  # of pytest
    whole = isinstance(expect, (str, Path))
    if isinstance(expect, (str, Path)):
        expect = {k: v for k, v in read(expect).items() if k not in KEPT_APART}
    lines = []
    for name, value in expect.items():
        if name in OF_LOSSES and name not in facts:
            lines.append(f"{name} is not known: no loss function of torch was replayed, expected {said(value)}")
            continue
        if name not in facts and not whole:
            known = ", ".join(facts)
            raise InputError("watch: expect", name, f"expected one of {known}{did_you_mean(name, facts)}")
        if not whole:
            _check(name, value)
        if name == "clip_norm" and facts.get(name) == NOT_BOUND and isinstance(value, (int, float)):
            if (most := max(facts["gradient_norms"])) > value:
                lines.append(
                    f"clip_norm is none: a gradient of norm {said(most)} was not clipped, expected {said(value)}"
                )
        elif name == "clip_norm" and "factors" in facts and not whole:
            lines.append(
                f"clip_norm is no norm of all gradients (factors: {said(facts['factors'])}), expected {said(value)}"
            )
        elif not alike(facts.get(name), value):
            lines += _apart(name, facts.get(name), value)
    return lines


def _apart(name: str, found: Any, wanted: Any) -> list[str]:
    """Returns how a fact is not as expected; for mappings, such as parameter groups, what differs in each."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        keys = [key for key in dict.fromkeys((*wanted, *found)) if not alike(found.get(key), wanted.get(key))]
        return [line for key in keys for line in _apart(f"{key} of {name}", found.get(key), wanted.get(key))]
    several = [
        isinstance(each, (list, tuple)) and all(isinstance(v, Mapping) for v in each) for each in (found, wanted)
    ]
    if all(several) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True), start=1)
        return [line for number, pair in pairs for line in _apart(f"{name.rstrip('s')} {number}", *pair)]
    how = repr if said(found) == said(wanted) else said  # such as "1" and 1
    return [f"{name} is {how(found)}, expected {how(wanted)}"]


def _check(name: str, value: Any) -> None:
    """Raises InputError if a fact of this name cannot have this value."""
    words = WORDS.get(name, ())
    if words and not isinstance(value, (list, tuple)) and value not in words:
        raise InputError(
            "watch: expect", f"{name}={value}", f"expected one of {', '.join(words)}{meant_precision(value, words)}"
        )
    if name == "clip_norm" and (isinstance(value, bool) or not isinstance(value, (int, float, list, tuple, NoneType))):
        raise InputError("watch: expect", f"{name}={value}", "expected a number, or None")


def alike(found: Any, wanted: Any) -> bool:
    """Returns whether a fact is as expected. Numbers are compared in four digits, because factors are known in four."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if said(wanted) == "none":  # as a card says for None and for an empty list
        return said(found) == "none"
    if isinstance(found, (int, float)) and isinstance(wanted, (int, float)):
        return math.isclose(found, wanted, rel_tol=1e-4, abs_tol=0.0)
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(alike(found[k], wanted[k]) for k in wanted)
    if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return bool(found == wanted)
