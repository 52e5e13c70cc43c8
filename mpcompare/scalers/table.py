"""The scales of all scalers on a console: after each step, and then where each parts from torch."""

import math
from collections.abc import Sequence

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpcompare.scalers.overflows import OverflowStep, power
from mpcompare.scalers.registry import INSTALL
from mpcompare.scalers.trace import Trace, parting

ALL, MOST = 24, 40  # steps of which all are shown, and rows of which no more are shown


def show(console: Console, traces: Sequence[Trace], steps: Sequence[OverflowStep]) -> None:
    """Prints the table of scales, and the summary. ``traces`` start with torch's."""
    _scales(console, traces, steps)
    _summary(console, traces)
    for trace in traces:
        if trace.stopped:
            _print(console, f"{trace.name}: ends training with an error at step {len(trace.steps)}")
    if unknown := ", ".join(f"{trace.name} {trace.unknown}" for trace in traces if trace.unknown):
        _print(console, f"Steps at a scale of which the record says nothing, which end as in the run: {unknown}")
    _print(console, "own code: " + ", ".join(trace.origin for trace in traces if trace.own))
    if stand_ins := [trace.origin for trace in traces if not trace.own]:
        _print(console, f"by the policies here: {', '.join(stand_ins)}; {INSTALL} brings the libraries")


def _scales(console: Console, traces: Sequence[Trace], steps: Sequence[OverflowStep]) -> None:
    rows = [place for place in range(len(steps)) if len(steps) <= ALL or _happens(traces, place)]
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("step", "finite at", *(trace.name for trace in traces)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("", "", *(power(trace.start) for trace in traces), style="dim")
    for place in rows[:MOST]:
        table.add_row(str(place + 1), said(steps[place]), *(_cell(trace, place) for trace in traces))
    _print(console, "Loss scale after each step (x: skipped)", style="bold")
    console.print(table)
    if left_out := len(rows[MOST:]):
        _print(console, f"{left_out} later steps at which a scale changes or a step is skipped are left out.")
    elif len(rows) < len(steps):
        _print(console, f"Of {len(steps)} steps, steps at which no scale changes and none is skipped are left out.")


def _summary(console: Console, traces: Sequence[Trace]) -> None:
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("start", "end", "skipped"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("parts from torch")
    for trace in traces:
        parted = parting(traces[0], trace)
        where = "" if trace is traces[0] else "step {}: {}".format(*parted) if parted else "nowhere"
        end = "stopped" if trace.stopped else power(trace.steps[-1].after)
        skipped = sum(step.skipped for step in trace.steps)
        table.add_row(trace.name, power(trace.start), end, str(skipped), where)
    console.print(table)


def said(step: OverflowStep) -> str:
    """Returns in a few characters at which loss scales the gradients of a step are known to be finite."""
    if step.finite_up_to > 0:
        return "all" if step.finite_up_to == math.inf else f"<= {power(step.finite_up_to)}"
    return f"< {power(step.overflows_from)}" if step.overflows_from > math.ulp(0.0) else "none"


def _happens(traces: Sequence[Trace], place: int) -> bool:
    taken = [trace.steps[place] for trace in traces if place < len(trace.steps)]
    return any(step.skipped or step.after != step.before for step in taken)


def _cell(trace: Trace, place: int) -> str:
    if place >= len(trace.steps):
        return ""
    step = trace.steps[place]
    return "stops" if step.stopped else power(step.after) + (" x" if step.skipped else "  ")


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text), style=style)
