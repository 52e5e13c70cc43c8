"""A check, and the case that it looks at."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpcompare.fields import ComparedRecord
from mpcompare.precision import PRECISIONS

if TYPE_CHECKING:  # the findings' own files import this one
    import pandas as pd

    from mpcompare.verdict.findings import Findings


@dataclass(frozen=True)
class Check:
    """A number and its limit. Kind, place and tensor are its identity."""

    place: str  # the property that was looked at, and where
    value: float
    limit: float  # the check passes where ``value <= limit``; NaN does not pass
    cause: str  # a word or two for what is wrong where it fails; docs/verdict.md lists them
    because: str  # the same in a sentence, with its numbers
    kind: str = ""  # one of ``kinds.KINDS``
    tensor: str = ""  # the tensor that was looked at; empty where several were
    layer: str = ""  # the layer at which the failure shows; empty where it shows at several
    detail: str = ""  # a few words that belong to the cause in a table; empty where the cause says it all
    # whether the limit bounds the roundings of each element, so that the worst of many comes near to it in correct
    # runs, too: nearness means nothing then
    tight: bool = False

    @property
    def name(self) -> str:
        """Place and tensor in a line."""
        return f"{self.place}, {self.tensor}" if self.tensor else self.place

    @property
    def passed(self) -> bool:
        """Whether the value is within its limit."""
        return self.value <= self.limit


Checks = Iterator[Check]  # a generator yields them


def worst_of(values: Mapping[str, float]) -> str:
    """Returns the name of the largest value, or of a NaN, which counts as larger than any number; empty where there are
    no values."""
    return max(values, key=lambda name: math.inf if math.isnan(values[name]) else values[name], default="")


def listed(names: Iterable[str]) -> str:
    """Returns the first two names, and the number of the others, so that a sentence stays short."""
    some = list(names)
    return ", ".join(some[:2]) + (f" and {len(some) - 2} more" if len(some) > 2 else "")


@dataclass(frozen=True)
class Timed:
    """The timed blocks of a run. One block is compared with the same block of the examined backend."""

    record: ComparedRecord  # what ``result.json`` says of them
    blocks: "pd.DataFrame"  # the rows of ``blocks.csv``


@dataclass(frozen=True)
class Examined:
    """Training that was examined."""

    name: str  # to speak of it
    precision: str  # the one asked for
    dtypes: dict[str, str]  # as observed, by ``params``, ``activations``, ``gradients``, ``loss`` and ``optimizer``
    findings: "Findings"  # the findings of the examination
    steps: "pd.DataFrame"  # the rows of ``steps.csv``
    # step and fingerprint of the weights where training went on; None: it began at the beginning
    start: tuple[int, str] | None = None
    timed: Timed | None = None  # the timed blocks; None where nothing was timed
    # the observed dtypes of each layer (``Backend.module_dtypes``); empty where they are not known
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @cached_property
    def unit_roundoff(self) -> float:
        """The unit roundoff of the precision in which the backend was asked to compute."""
        return PRECISIONS[self.findings.precision].unit_roundoff


@dataclass(frozen=True)
class Case:
    """A run compared with its reference, which may be the run itself."""

    run: Examined
    reference: Examined

    @property
    def is_reference(self) -> bool:
        """Whether the run is the reference itself, so that checks that compare two runs do not apply."""
        return self.run is self.reference

    def found(self, check: str) -> Iterator[Any]:
        """Yields what the pass of a check found of the run and of its reference; None where it found nothing."""
        return (each.findings.of_checks.get(check) for each in (self.run, self.reference))
