"""A defect: what no intention makes right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpcompare.verdict.judge.check import Check
from mpcompare.watching.looking import Look


@dataclass(frozen=True)
class Defect:
    """Something that no intention makes right.

    Attributes:
        cause: a word or two, as those of docs/verdict.md.
        place: the layer, parameter or part of the loop; may be empty.
        sentence: the defect with its numbers.
    """

    cause: str
    place: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.sentence}"


def names_of(look: Look) -> list[str]:
    names = [n for n, _ in look.network.named_modules() if n] + list(look.params)
    names += [n for n, _ in look.network.named_buffers()]
    return sorted(set(names), key=len, reverse=True)


def failed(checks: Iterator[Check], names: Sequence[str]) -> Iterator[Defect]:
    for check in checks:
        if not check.passed:
            place = next((n for n in names if _says(check.because, n)), "")
            place = place or check.tensor or next((n for n in names if _says(check.place, n)), "")
            yield Defect(check.cause or "gradients", place, check.because)


def _says(text: str, name: str) -> bool:
    return any(word.strip(",.:;()") == name for word in text.split())
