"""A defect: what no intention makes right. The judge of backends finds some: it is given a loop as a backend."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from mpcompare.verdict.examine.layers import owners
from mpcompare.verdict.findings import Findings, Recipe
from mpcompare.verdict.judge.check import Check, Examined
from mpcompare.verdict.judge.drive import Drive, Gradients
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


def as_examined(
    look: Look, precision: str, recipe: Recipe, longest_sum: int = 1, order: Sequence[str] = ()
) -> Examined:
    """Returns a loop in the form in which the judge is given a backend.

    Args:
        longest_sum: about how many numbers are summed at most.
        order: the layers in the order of their calls.
    """
    layers, nothing = owners(look.network, order, {}), Gradients(math.nan, math.nan, math.nan)
    findings = Findings(precision, recipe, longest_sum, layers, Drive(), nothing)
    return Examined("the loop", precision, {}, findings, pd.DataFrame())


def failed(checks: Iterator[Check], look: Look) -> Iterator[Defect]:
    """Yields a defect for each check that failed, at the layer or tensor that the check names."""
    names = _names_of(look)
    for check in checks:
        if not check.passed:
            place = next((n for n in names if _says(check.because, n)), "")
            place = place or check.tensor or next((n for n in names if _says(check.place, n)), "")
            yield Defect(check.cause or "gradients", place, check.because)


def _names_of(look: Look) -> list[str]:
    """Returns the names of modules, parameters and buffers, the longest first."""
    names = [n for n, _ in look.network.named_modules() if n] + list(look.params)
    names += [n for n, _ in look.network.named_buffers()]
    return sorted(set(names), key=len, reverse=True)


def _says(text: str, name: str) -> bool:
    return any(word.strip(",.:;()") == name for word in text.split())
