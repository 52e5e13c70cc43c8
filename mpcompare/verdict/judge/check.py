"""What a check of the verdict is."""

from dataclasses import dataclass
from typing import Any

FP32 = 2.0**-24  # unit roundoff
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """Something that was looked at.

    Attributes:
        kind: one of ``checks.KINDS``.
        name: what, and of which tensor.
        value, limit: it passes where ``value <= limit``; NaN does not pass.
        cause: what is wrong where it fails, in a word or two; docs/verdict.md lists them.
        because: the same in a sentence, with its numbers.
    """

    name: str
    value: float
    limit: float
    cause: str
    because: str
    kind: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.limit
