"""The map of a network: the digits that each layer loses in 16 bits, and the layers that should stay in fp32.

``digits.csv``, a figure, a table and a line show it. It is a map of the network and not of a backend, so the figure and
the line take one run of each precision: the reference of the others, where it shows its layers.
"""

from mpcompare.precision import PRECISIONS
from mpcompare.report.columns import OF_RUN, TEXT, Column, named, number
from mpcompare.report.comparison import Comparison
from mpcompare.report.digits_row import DigitsRow, Map
from mpcompare.verdict.judge.replayed import percent

STEPS = ("last", "first")  # the replays of a training step; the first in this list is shown first


def maps(comparison: Comparison) -> list[Map]:
    """Returns the maps of all runs, of each step."""
    found = []
    for entry in comparison.finished:
        replays = entry.run.findings.replays if entry.run.findings else {}
        reference = comparison.reference(entry) or entry
        found += [
            Map(comparison, entry, reference, step, replays[step].digits)
            for step in STEPS
            if step in replays and replays[step].digits
        ]
    return found


def shown(comparison: Comparison) -> list[Map]:
    """Returns a map for each precision: the reference's map where it shows its layers, else the map of the first run
    that does. The map is from after training where that is known."""
    first: dict[str, Map] = {}
    for each in sorted(maps(comparison), key=lambda m: (m.entry is not m.reference, m.step != STEPS[0])):
        first.setdefault(each.precision.name, each)
    return list(first.values())


def lines(comparison: Comparison) -> list[str]:
    """Returns a line for each precision of 16 bits: the layer that loses the most digits, and the layers that should
    stay in fp32; or that nothing is known."""
    known = {each.precision.name: each for each in shown(comparison)}
    examined = [e.run.result.precision for e in comparison.finished if e.run.findings]
    asked = [p for p in dict.fromkeys(examined) if PRECISIONS[p].is_16_bit]
    unknown = "the digits that {} loses are not known: no run shows its layers"
    return [_line(known[p]) if p in known else unknown.format(p) for p in asked]


def _line(each: Map) -> str:
    rows = sorted(each.rows, key=lambda row: row.rank, reverse=True)
    (worst, *_), advised = rows, sum(bool(row.advice) for row in rows)
    start = "Numbers go beyond {}" if worst.overflows else "Rounding to {} matters most"
    name = worst.name  # behind the class of the layer, because many names are numbers
    where = name if name.startswith("before ") else " ".join(filter(None, ("in", worst.digits.kind, name)))
    text = f"{start.format(each.precision.name)} {where}, {each.when}"
    seen = f"of the {len(rows)} places that were seen"
    if advised:
        return f"{text}: {worst.because}. {advised} {seen} should stay in fp32."
    part, error, _ = worst.worst
    changes = f"one rounding changes its {part} by {percent(error)}"
    return f"{text}: {changes}. None {seen} loses half of its digits or overflows."


def _digits(name: str, meaning: str, heading: str = "", spec: str = ".2g", per: float = 1.0) -> Column[DigitsRow]:
    return Column(name, "1", meaning, lambda row: getattr(row.digits, name), heading=heading, text=number(spec, per))


def _lost(part: str) -> Column[DigitsRow]:
    meaning = f"The binary digits of its {part} that are lost if each operand and each result is rounded once."
    return Column(
        f"{part}_lost", "1", meaning, lambda row: row.lost(getattr(row.digits, part)),
        heading=f"{part}: lost digits", text=number(".1f"),
    )  # fmt: skip


COLUMNS: tuple[Column[DigitsRow], ...] = (
    *OF_RUN,
    Column("step", TEXT, "The step: first, or last, the one after training.", lambda row: row.map.step),
    Column("layer", TEXT, "The layer, or the work before one.", lambda row: row.name, heading="layer"),
    Column("kind", TEXT, "The class of the layer.", lambda row: row.digits.kind, heading="class"),
    Column("computes", TEXT, "The dtypes in which the run computes it.", lambda row: row.computes(row.entry),
           heading="computed in"),
    Column("reference_computes", TEXT, "The same of the reference.", lambda row: row.computes(row.map.reference)),
    _digits("output", "The relative error of its output if each operand and each result is rounded once."),
    _lost("output"),
    _digits("gradient", "The same of the gradients that its backward computes."),
    _lost("gradient"),
    _digits("terms", "The size of what is summed in its output, relative to the output.", "terms / output"),
    _digits("gradient_terms", "The same of these gradients.", "terms / gradient"),
    _digits("loss", "The relative change of the loss if its output is rounded once.", "loss %", ".1g", 0.01),
    _digits("overflow", "The share of its output, or of the gradient that arrives there, beyond the format.",
            "overflow %", ".2g", 0.01),
    _digits("underflow", "The share of that gradient, with the loss scale, below the format's normal numbers.",
            "underflow %", ".2g", 0.01),
    Column("advice", TEXT, "Whether it should stay in fp32.", lambda row: row.advice, heading="advice"),
    Column("why", TEXT, "The reasons.", lambda row: row.why, heading="because"),
)  # fmt: skip
SHOWN = named(
    COLUMNS,
    "label layer kind computes output_lost gradient_lost advice why terms gradient_terms loss overflow underflow",
)
