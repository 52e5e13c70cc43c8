"""The overflows that all scalers take: from a pattern, from a file of thresholds, or from a recorded run."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from mpcompare.errors import InputError, shortened
from mpcompare.records import STEPS, whole_lines

SHOWN = 40  # characters of a pattern


@dataclass(frozen=True)
class OverflowStep:
    """The knowledge of a step: the loss scales at which its gradients overflow."""

    finite_up_to: float  # the largest loss scale at which they are known to be finite
    overflows_from: float  # the smallest one at which they are known to overflow
    unknown: bool = False  # whether a scale between the two is taken to overflow

    def overflows(self, scale: float) -> bool:
        return self.unknown if self.is_unknown(scale) else scale > self.finite_up_to

    @property
    def threshold(self) -> float | None:
        """The largest scale at which the gradients are finite, if it is known and a number; None else."""
        known = self.overflows_from == math.nextafter(self.finite_up_to, math.inf)
        return self.finite_up_to if known and 0 < self.finite_up_to < math.inf else None

    def is_unknown(self, scale: float) -> bool:
        return self.finite_up_to < scale < self.overflows_from


FINITE, OVERFLOW = OverflowStep(math.inf, math.inf), OverflowStep(-math.inf, -math.inf)


def of_pattern(pattern: str) -> list[OverflowStep]:
    """Returns the steps of ``..x....xx..``: a dot is finite and an x overflows, whatever the loss scale is. Raises
    InputError where the pattern is empty, or holds another character."""
    if not pattern:
        raise InputError("PATTERN", "''", "expected a dot for each finite step and an x for each overflow")
    for place, character in enumerate(pattern, start=1):
        if character not in ".x":
            expected = f"character {place} is {character!r}: expected a dot (finite) or an x (overflow)"
            raise InputError("PATTERN", shortened(pattern, SHOWN), expected)
    return [OVERFLOW if character == "x" else FINITE for character in pattern]


def of_thresholds(file: Path) -> list[OverflowStep]:
    """Returns the steps of a file that has a number for each: the largest loss scale at which the gradients of that
    step stay finite (0: they overflow at any; inf: at none). Empty lines and text after a # are passed over. Raises
    InputError where the file cannot be read, has no number, or a line is no number."""
    steps = []
    for number, line in enumerate(_text("--thresholds", file).splitlines(), start=1):
        if text := line.partition("#")[0].strip():
            steps.append(_threshold(file, number, text))
    if not steps:
        raise InputError("--thresholds", file, "holds no number: expected the threshold of a step on each line")
    return steps


def _threshold(file: Path, number: int, text: str) -> OverflowStep:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise InputError("--thresholds", file, f"line {number} is {text!r}: expected a loss scale, 0 or inf")
    return OverflowStep(value, math.nextafter(value, math.inf))


def of_run(folder: Path) -> tuple[list[OverflowStep], float]:
    """Returns the steps of a recorded run, and the loss scale of its first one.

    Its record holds each step's loss scale and whether the step was skipped. Gradients that were finite at a scale are
    finite at any smaller scale. Gradients that overflowed at a scale overflow at any larger scale. Of other scales the
    record says nothing, and the step is taken to end as it did in the run. Raises InputError where the folder holds no
    such record, or the run scaled no loss."""
    file = folder / STEPS if folder.is_dir() else folder
    try:
        rows = list(csv.DictReader(whole_lines(_text("--run", file)).splitlines()))
    except csv.Error:  # another file, such as one whose lines are longer than any table's
        rows = []
    if not rows or not {"loss_scale", "skipped"} <= rows[0].keys():
        raise InputError("--run", folder, f"expected the folder of a run, with steps in {STEPS}")
    try:
        scales = [float(row["loss_scale"]) for row in rows]
    except (TypeError, ValueError):
        raise InputError("--run", folder, f"{STEPS} holds a row without a loss scale") from None
    if set(scales) == {1.0} and all(row["skipped"] != "True" for row in rows):
        raise InputError("--run", folder, "this run scaled no loss: its loss scale is 1 in every step")
    steps = [
        OverflowStep(-math.inf, scale, unknown=True) if row["skipped"] == "True" else OverflowStep(scale, math.inf)
        for scale, row in zip(scales, rows, strict=True)
    ]
    return steps, scales[0]


def _text(option: str, file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(option, file, f"cannot read it ({getattr(error, 'strerror', None) or 'no text'})") from None


def power(scale: float) -> str:
    """Returns a scale as 2^16 if it is a power of two, else as a number."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.6g}"
