"""The rows of figures that show large networks: names that differ in their numbers alone stand together."""

import re
from collections.abc import Callable, Hashable, Sequence

Key = Callable[[str], Hashable]
NUMBER = re.compile(r"(^|\.)\d+(?=\.)")  # of a block: a whole part of a name, and not the last


def groups_of(names: Sequence[str], keys: Sequence[Key], most: int) -> list[list[str]]:
    """Returns the names in groups that share a key, in the order of their first names.

    Args:
        keys: from the finest to the coarsest; the first that makes at most ``most`` groups is taken, or the last.
    """
    groups: dict[Hashable, list[str]] = {}
    for key in keys:
        groups = {}
        for name in names:
            groups.setdefault(key(name), []).append(name)
        if len(groups) <= most:
            break
    return list(groups.values())


def without_first_number(name: str) -> str:
    """Returns ``blocks.#.up.0.weight`` for ``blocks.3.up.0.weight``: the name without the number of its block."""
    return NUMBER.sub(r"\1#", name, count=1)


def without_block_numbers(name: str) -> str:
    """Returns ``blocks.#.up.#.weight`` for ``blocks.3.up.0.weight``; numbers within a word and at the end stay."""
    return NUMBER.sub(r"\1#", name)


def without_numbers(name: str) -> str:
    """Returns ``layer#.#.conv#`` for ``layer3.0.conv2``."""
    return re.sub(r"\d+", "#", name)


def span(names: Sequence[str]) -> str:
    """Returns ``blocks.0..11.up`` for names that differ in numbers alone; empty for others."""
    if len(set(map(without_numbers, names))) > 1:
        return ""
    first, last = (re.split(r"(\d+)", name) for name in (names[0], names[-1]))
    return "".join(a if a == b else f"{a}..{b}" for a, b in zip(first, last, strict=True))
