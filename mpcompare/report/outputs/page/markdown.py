"""Text for Markdown: names and errors are shown as they are, whatever they hold."""

import re
from collections.abc import Iterable, Sequence

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&])")


def plain(text: str) -> str:
    """Returns text that Markdown shows as it is, in one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of plain text."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(plain, line) if line is not lines[1] else line)} |" for line in lines)
