"""Are running statistics right, and in what format are they kept?

- *Value.* Running statistics after the first step, and after a skipped one: torch moves them in the forward pass. The
  formats of all that training moves, and the digits of their numbers.
- *Limit.* As for a gradient, except that the statistics themselves are fp32. A buffer that every step moves is not kept
  in 16 bits, where a sum of ones stops at 256 (bf16) or 2048 (fp16). Numbers with 16-bit digits are a count.
"""

import math
from dataclasses import dataclass, replace

from mpcompare.verdict.judge.check import Case, Check, Checks, listed
from mpcompare.verdict.judge.dtypes import SHORT
from mpcompare.verdict.judge.errors import Errors, RoundingErrors
from mpcompare.verdict.judge.limits import K, stored_coarsely, tensor_limit

IN_16_BITS = "buffers in 16 bits"


@dataclass(frozen=True)
class Buffer:
    """A buffer that training has moved."""

    dtype: str  # the format in which the backend shows it
    should_dtype: str  # the format that the network keeps it in
    sketch: list[float]  # the sketch of its numbers
    whole: str = ""  # a whole number, or a fingerprint of several; empty where the network has other numbers
    elements: int = 0  # how many of its numbers are not 0
    short: float = 0.0  # of the numbers that are not 0, the share that have no more digits than a 16-bit format


Buffers = dict[str, Buffer]


def checks(case: Case) -> Checks:
    """Yields a check for each buffer in the passes ``first``, unless a forced replay sees it, and ``overflow``; and
    one for the digits of all that training moves."""
    yield from _formats(case)
    if not case.is_reference:
        yield from _digits(case)
    if "first" not in case.run.findings.replays:
        yield from _of_pass(case, "first", "after the first step", case.run.findings.rounding)
    yield from _of_pass(case, "overflow", "after a skipped step", {})


def cause_of(case: Case, name: str) -> str:
    """Returns the cause of a wrong buffer: the format in which it is kept, or the role of its owner."""
    b, beside = (each.findings.buffers.get(name) for each in (case.run, case.reference))
    if b and (b.dtype in SHORT or (b.elements and b.short == 1 and beside and beside.short < 1)):
        return IN_16_BITS
    layer = case.run.findings.layers.get(name)
    return "running statistics" if layer and layer.role == "normalization" else "buffers"


def _formats(case: Case) -> Checks:
    """Yields a check of each buffer that training moves. Buffers that never change may be kept in any format that
    holds their values, which the first step shows."""
    if stored_coarsely(case.run):
        return
    for name, b in case.run.findings.buffers.items():
        short = b.dtype in SHORT and b.should_dtype not in SHORT
        because = f"{name}, which every step moves, is kept in {b.dtype}, and in {b.should_dtype} in the network"
        yield Check("format of buffer", float(short), 0, IN_16_BITS, because, tensor=name)


def _digits(case: Case) -> Checks:
    """Numbers with 24 digits seldom end in 13 zeros: as many as the reference has, twice, and 9 times more (Poisson,
    1e-6), of all buffers together."""
    run, reference = case.run.findings.buffers, case.reference.findings.buffers
    if not run or not reference or stored_coarsely(case.run):
        return
    names = [name for name, b in run.items() if name in reference and not b.whole and b.should_dtype not in SHORT]
    short, expected = (sum(of[name].short * of[name].elements for name in names) for of in (run, reference))
    worst = listed(name for name in names if run[name].short > max(0.5, reference[name].short))
    because = f"{short:.0f} numbers of buffers have the digits of 16-bit numbers ({worst}), of the reference's "
    yield Check("digits of buffers", short, K * expected + 9, IN_16_BITS, f"{because}{expected:.0f}")


def _of_pass(case: Case, where: str, after: str, roundings: RoundingErrors) -> Checks:
    """Yields the checks of one pass. The numbers that buffers are made of may be rounded, and they may not."""
    run, reference = case.run.findings.drives.get(where), case.reference.findings.drives.get(where)
    if not case.is_reference and run and reference and run.buffers:
        yield from of_step(case, after, run.buffers, reference.buffers, roundings)


def of_step(case: Case, after: str, own: Errors, others: Errors, roundings: RoundingErrors, more: str = "") -> Checks:
    """Yields the checks of the buffers ``after`` a step, as far as the reference shows them; ``more`` goes on after
    their sentences."""
    for name, e in others.items():
        if e is None:
            continue
        found, limit = own.get(name), tensor_limit(case.run, replace(e, largest=0.0), roundings.get(name))
        limit += stored_coarsely(case.run) * e.norm
        if not math.isnan(limit):
            error = found.error if found else math.inf
            because = f"{name} is off by {error / max(e.norm, 1e-300):.1e} of its norm {after}{more}"
            yield Check(f"buffer {after}", error, limit, cause_of(case, name), because, tensor=name)
