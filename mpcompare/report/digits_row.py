"""A row of the map of lost digits: a layer, or the work before one, and whether it should stay in fp32.

A layer should stay in fp32 where one rounding of each of its operands and results is more than sqrt(u) of its output or
its gradient, u being the unit roundoff: half of the digits are gone. fp32 has to keep as much there, or no precision
helps, as where a gradient is exactly 0. A layer should stay in fp32, too, where a result is beyond the format.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mpcompare.precision import FP32, PRECISIONS, Precision
from mpcompare.report.comparison import Entry, Row
from mpcompare.report.dtypes import layers_of
from mpcompare.verdict.judge.replayed import WHERE, Digits, beyond, percent

MOST = 0.5  # a larger share is most of the numbers of a tensor


@dataclass(frozen=True)
class Map(Row):
    """The digits that each place of a network loses in a step of a run; ``reference`` is the run that others are
    compared with, whose dtypes are shown, too."""

    reference: Entry
    step: str
    digits: Mapping[str, Digits]

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.entry.run.result.precision]

    @property
    def when(self) -> str:
        return WHERE[self.step]

    @property
    def rows(self) -> list["DigitsRow"]:
        """The rows in the order of forward."""
        return [DigitsRow(self.comparison, self.entry, self, place, digits) for place, digits in self.digits.items()]


def half_lost(precision: Precision) -> float:
    """Returns the relative error at which half of the digits of a precision are lost."""
    return math.sqrt(precision.unit_roundoff)


@dataclass(frozen=True)
class DigitsRow(Row):
    """A layer, or the work before one."""

    map: Map
    place: str
    digits: Digits

    @property
    def name(self) -> str:
        return self.place.replace("before (output)", "before the output") or "(model)"

    def lost(self, error: float) -> float:
        """Returns the number of binary digits that a relative error costs."""
        u = self.map.precision.unit_roundoff
        return min(max(0.0, math.log2(max(error, u) / u)), -math.log2(u))

    @property
    def advice(self) -> str:
        """``keep in fp32``, with what has to come in fp32, too; empty where 16 bits are enough."""
        if self._too_few(self.worst[1]):
            return "keep in fp32, with what it is given" if self._cancels else "keep in fp32"
        return "keep in fp32" if self.overflows else ""

    @property
    def why(self) -> str:
        """The reasons for the advice; or that a result is nothing but roundings in fp32, too."""
        own, precision = self.digits, self.map.precision
        reasons = [beyond(own, precision.name)]
        if own.overflow:
            largest = f"{precision.storage.maximum:g}"
            reasons.append(f"{percent(own.overflow)} of its output or its gradient above {largest}")
        part, error, terms = self.worst
        if self._too_few(error):
            cancels = f", for it sums what is {terms:.2g} times as large" if self._cancels else ""
            reasons.append(f"one rounding is {percent(error)} of its {part}{cancels}")
        if self._too_few(own.gradient) and own.underflow > MOST:
            reasons.append(f"most of the gradient that arrives is below {precision.name}'s normal numbers")
        for part, error in (("output", own.output), ("gradient", own.gradient)):
            if self._hopeless(error):
                reasons.append(f"its {part} is 0 but for roundings, in fp32 too")
        return "; ".join(filter(None, reasons))

    @property
    def worst(self) -> tuple[str, float, float]:
        """``output`` or ``gradient``, whichever loses more digits, its error and its terms. A part that is hopeless is
        left out."""
        own = self.digits
        parts = [("output", own.output, own.terms), ("gradient", own.gradient, own.gradient_terms)]
        return max((p for p in parts if not self._hopeless(p[1])), key=lambda p: p[1], default=("output", 0.0, 0.0))

    @property
    def overflows(self) -> bool:
        return bool(self.digits.operator or self.digits.overflow)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The larger the rank is, the more it matters that the layer stays in fp32."""
        return self.overflows, bool(self.advice), self.worst[1]

    @property
    def because(self) -> str:
        """The reasons, and the dtypes in which the reference computes the layer."""
        computes = self.computes(self.map.reference)
        return f"{self.why}; {self.map.reference.label} computes it in {computes}" if computes else self.why

    def computes(self, entry: Entry) -> str | None:
        """The dtypes in which a run computes the layer; None where they were not observed."""
        return (layers_of(entry).get(self.place) or {}).get("computes")

    def _too_few(self, error: float) -> bool:
        """Returns whether more than half of the digits are lost, and fp32 would keep half of them."""
        return error > half_lost(self.map.precision) and not self._hopeless(error)

    def _hopeless(self, error: float) -> bool:
        """Returns whether half of the digits were lost in fp32, too."""
        return error * FP32.unit_roundoff > half_lost(self.map.precision) * self.map.precision.unit_roundoff

    @property
    def _cancels(self) -> bool:
        """Whether more of the worst error comes from a layer's operands than from its own results."""
        _, error, terms = self.worst
        return self.map.precision.unit_roundoff * terms / math.sqrt(3) > error / math.sqrt(2)
