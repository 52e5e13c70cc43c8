"""What a cause means and what to do about it: its section of ``docs/differs.md``, as HTML."""

import re
from functools import cache

from markdown_it import MarkdownIt
from markupsafe import Markup

from mpcompare.paths import DIFFERS

_MARKDOWN = MarkdownIt("commonmark", {"html": False})


def advice(cause: str) -> Markup:
    """Returns the section of a cause; empty if there is none."""
    text = _MARKDOWN.render(_sections().get(cause, ""))
    return Markup(text.replace("<pre>", '<pre tabindex="0">'))  # the project's own document, without raw HTML


@cache
def _sections() -> dict[str, str]:
    """Returns the text of each section of the third level, by its heading."""
    text = re.sub(r"<!--.*?-->", "", DIFFERS.read_text(encoding="utf-8"), flags=re.DOTALL)
    below = re.split(r"^### (.+)$", text, flags=re.MULTILINE)[1:]
    ends = (re.split(r"^## ", body, flags=re.MULTILINE)[0] for body in below[1::2])
    return dict(zip(below[::2], ends, strict=True))
