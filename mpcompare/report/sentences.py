"""Sentences about runs, whose names each output writes in its own way."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpcompare.report.comparison import Entry

MOST = 4  # runs that a sentence names, or that have a sentence of their own
WORDS = 17  # of a reason; the rest of it is unfolded elsewhere


class Name(str):
    """The label of a run within a sentence."""


Sentence = Sequence[str]  # pieces, some of which are a Name


@dataclass(frozen=True)
class Answer:
    """A question and its answer."""

    question: str
    sentences: Sequence[Sentence]

    def lines(self, name: Callable[[str], str] = str, rest: Callable[[str], str] = str) -> list[str]:
        """Returns the sentences, with each name and each other piece as these functions write it."""
        return ["".join(name(p) if isinstance(p, Name) else rest(p) for p in sentence) for sentence in self.sentences]


def about(entries: Sequence[Entry], one: str, several: str | None = None) -> list[Sentence]:
    """Returns a sentence about runs, as ``a, b and 3 more differ``; none where there are no runs.

    Args:
        one: what is said of one run.
        several: what is said of more than one; None for the same.
    """
    if not entries:
        return []
    shown = entries if len(entries) <= MOST else entries[: MOST - 1]
    names: list[str] = [Name(entry.label) for entry in shown]
    if len(shown) < len(entries):
        names.append(f"{len(entries) - len(shown)} more")
    pieces = [piece for name in names for piece in (name, ", ")][:-1]
    if len(names) > 1:
        pieces[-2] = " and "
    return [(*pieces, one if len(entries) == 1 or several is None else several)]


def first_clause(because: str) -> str:
    """Returns the beginning of a reason as the end of a sentence, with no more than its first tensors."""
    clause = re.split(r"(?:: |; | \()", because, maxsplit=1)[0]
    words = re.sub(r",? and \d+ more\b", "", clause).split()
    return " ".join(words[:WORDS]) + (" ..." if len(words) > WORDS else ".")
