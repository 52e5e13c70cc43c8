"""A defect: what no intention makes right. The judge of backends finds some defects: it sees the loop as a backend."""

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
    """Something that no intention makes right."""

    cause: str  # a word or two, like the causes of docs/verdict.md
    place: str  # the layer, parameter or part of the loop; may be empty
    sentence: str  # the defect with its numbers

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


def failed(checks: Iterator[Check]) -> Iterator[Defect]:
    """Yields a defect for each sentence on checks that failed, at the layer or the first tensor that it is about."""
    said = set()
    for check in checks:
        if not check.passed and check.because not in said:
            said.add(check.because)
            yield Defect(check.cause or "gradients", check.layer or check.tensor, check.because)
