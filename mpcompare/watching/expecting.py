"""Facts that are expected: given by name, or as a card that was saved."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from mpcompare.errors import InputError, did_you_mean

KEPT_APART = (  # of one look, and no property of the loop
    "updates", "skipped", "clipped_updates", "scales", "micro_batch_labels", "order", "gradient_norms",
    "backwards_left_out", "updates_before",
)  # fmt: skip
WORDS = {
    "precision": ("fp32", "bf16", "fp16"),
    "autocast": ("none", "bf16", "fp16"),
    "clip_place": ("after backward", "before unscaling", "after unscaling"),
}  # of facts that are one of few
OF_LOSSES = ("loss", "micro_batch_weights", "micro_batch_labels")  # which are not there where no loss was replayed
NOT_SEEN = "not known: no layer was seen"
NOT_BOUND = "not known: a norm was taken, and no gradient was clipped to it"


def said(value: Any) -> str:
    """Returns a fact in words."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {said(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        short = [f"[{said(each)}]" if isinstance(each, (list, tuple)) else said(each) for each in value[:8]]
        return ", ".join(short) + (f" and {len(value) - 8} more" if len(value) > 8 else "")
    return str(value)


def save(facts: Mapping[str, Any], file: str | Path) -> None:
    """Writes a card, sorted, a fact a line or more, so that two of them are compared well."""
    path = Path(file)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({"mpcompare": "watch", "facts": facts}, indent=1, sort_keys=True) + "\n")
    partial.replace(path)


def read(file: str | Path) -> dict[str, Any]:
    """Returns the facts of a card.

    Raises:
        InputError: it is none.
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
        InputError: a fact of that name is unknown, or cannot have that value, or the file is no card.
    """
    whole = isinstance(expect, (str, Path))
    if isinstance(expect, (str, Path)):
        expect = {k: v for k, v in read(expect).items() if k not in KEPT_APART}
    lines = []
    for name, value in expect.items():
        if name in OF_LOSSES and name not in facts:
            lines.append(f"{name} is not known: no loss was replayed, expected {said(value)}")
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
            lines.append(f"clip_norm is no norm of all gradients, which have several factors, expected {said(value)}")
        elif not alike(facts.get(name), value):
            lines.append(f"{name} is {said(facts.get(name))}, expected {said(value)}")
    return lines


def _check(name: str, value: Any) -> None:
    """Raises InputError where a fact of this name has no such value."""
    words = WORDS.get(name, ())
    if words and not isinstance(value, (list, tuple)) and value not in words:
        raise InputError("watch: expect", f"{name}={value}", f"expected one of {', '.join(words)}")
    if name == "clip_norm" and (isinstance(value, bool) or not isinstance(value, (int, float, list, tuple, NoneType))):
        raise InputError("watch: expect", f"{name}={value}", "expected a number, or None")


def alike(found: Any, wanted: Any) -> bool:
    """Returns whether a fact is as expected; numbers in the four digits in which factors are known."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, (int, float)) and isinstance(wanted, (int, float)):
        return math.isclose(found, wanted, rel_tol=1e-4, abs_tol=0.0)
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(alike(found[k], wanted[k]) for k in wanted)
    if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return bool(found == wanted)
