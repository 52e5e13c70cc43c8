"""The words of the watch on one loop, for the tables and the tests."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import mpcompare
from mpcompare.errors import InputError
from mpcompare.watching import expecting
from mpcompare.watching.watched import NOTHING, Watch

SLACK = 12  # more updates, since the watch does not count updates that a scaler skips


@dataclass
class Judged:
    """The words of the watch on a loop.

    Attributes:
        verdict: its word, or ``error``.
        causes, places, sentences: of the defects; an error's message is the sentence of an error.
        expected: the complaint of the watch when it is told what the user meant; empty if it has none.
        differing: only the facts that are not what the user meant.
        text: all that the watch prints.
        seconds: the time of the watched training.
        not_examined: what could not be seen, in words.
    """

    verdict: str
    causes: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    expected: str = ""
    differing: list[str] = field(default_factory=list)
    text: str = ""
    seconds: float = 0.0
    not_examined: list[str] = field(default_factory=list)

    @property
    def flagged(self) -> bool:
        return bool(self.causes)


class Trains(Protocol):
    """The parts of a judged loop: network and optimizer, as a user gives them to the watch, and training."""

    @property
    def model(self) -> Any: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def train(self) -> Callable[[int], None]: ...


def judged(loop: Trains, meant: dict[str, Any], after: int = 0, steps: int = 5, slack: int = SLACK) -> Judged:
    """Trains a loop that was just made under the watch, and returns what the watch says."""
    began = time.perf_counter()
    try:
        with mpcompare.watch(loop.model, loop.optimizer, steps=steps, after=after) as seen:
            loop.train(after + steps + slack)
        seconds = time.perf_counter() - began
        defects, text = list(seen.defects), str(seen)
    except Exception as error:  # a table of all loops goes on, and says which one broke
        return Judged("error", sentences=[f"{type(error).__name__}: {error}"])
    expected = ""
    try:
        seen.raise_if_wrong(expect=meant)
    except Exception as error:
        expected = one_line(error)
    told = ([one_line(getattr(defect, name)) for defect in defects] for name in ("cause", "place", "sentence"))
    return Judged(str(seen.verdict), *told, expected, differing(seen, meant), text, seconds, seen.not_examined)


def differing(seen: Watch, meant: dict[str, Any]) -> list[str]:
    """Returns the facts that are not what the user meant."""
    if not seen.facts.get("updates"):
        return [NOTHING]
    try:
        return [one_line(each) for each in expecting.differences(seen.facts, meant)]
    except InputError as error:
        return [one_line(error)]


def one_line(text: object) -> str:
    return " ".join(str(text).split())
