"""The tables of the page: of runs, inference and digits, with a key by which each cell is sorted; and tables that hold
a value of each run in a row: configurations, how it was measured, versions, and dtypes."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpcompare.numerals import short
from mpcompare.records import named_fields
from mpcompare.report import digits as maps
from mpcompare.report import inference, summary
from mpcompare.report.columns import Column
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.dtypes import ROLES, differing, layers_of, observed
from mpcompare.report.figures.dtypes import alike, grouped

Values = Mapping[str, Any]  # the settings of a run, by name


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and the number by which it is sorted; None where it is sorted by its text."""

    text: str
    key: float | None = None


@dataclass(frozen=True)
class Table:
    """A table: the columns, the cells of each row, and the class of each row, if rows have one."""

    columns: Sequence[Column[Any]]
    rows: Sequence[Sequence[Cell]]
    kinds: Sequence[str] = ()


def runs(comparison: Comparison) -> Table:
    """Returns the table of runs: what differs comes first, and the verdict stands next to the name.

    A run that did not finish has its names and its status.
    """
    names = (*summary.NAMES, "verdict")
    shown = summary.shown(comparison)
    columns = sorted(shown, key=lambda column: names.index(column.name) if column.name in names else len(names))
    rows = sorted(comparison.rows, key=lambda row: row.entry.word.rank)
    cells = [
        [_cell(column, row) if row.entry.ok else Cell(summary.cell(column, row)) for column in columns] for row in rows
    ]
    return Table(columns, cells, [row.entry.word.kind for row in rows])


def ways(comparison: Comparison) -> Table:
    """Returns the table of inference: a row for each run and way; without rows where nothing was tried."""
    rows = inference.rows_of(comparison)
    cells = [[_cell(column, row) if row.shows(column) else Cell("") for column in inference.SHOWN] for row in rows]
    return Table(inference.SHOWN, cells)


def digits(comparison: Comparison) -> Table:
    """Returns the table of the digits that layers lose, in each precision of 16 bits."""
    rows = [row for each in maps.shown(comparison) for row in each.rows]
    return Table(maps.SHOWN, [[_cell(column, row) for column in maps.SHOWN] for row in rows])


def _cell(column: Column[Any], row: Any) -> Cell:
    value = column.value(row)
    first = value[0] if isinstance(value, tuple) else value
    number = float(first) if isinstance(first, (int, float)) else math.nan
    text = column.cell(row)
    return Cell(text, None if math.isnan(number) or text == "-" else number)


class Setting(NamedTuple):
    """A row: its name, the texts of all runs, and whether they differ."""

    name: str
    values: Sequence[str]
    differs: bool


class LayerRow(NamedTuple):
    """A row of the table of dtypes: layers that are alike, and by run their dtypes with whether each differs."""

    name: str
    layer_class: str
    runs: Sequence[Sequence[tuple[str, bool]]]
    differs: bool


class Settings(NamedTuple):
    """A table with a column, or one for each of ``ROLES``, for each label."""

    labels: Sequence[str]
    rows: Sequence[Setting | LayerRow]


def configurations(comparison: Comparison) -> Settings:
    """Returns every field of the configurations."""

    def of(entry: Entry) -> Values:
        config = entry.run.result.config
        return {field: value for key in config for field, value in named_fields(key, config[key]).items()}

    return _settings(comparison.entries, of)


def measured(comparison: Comparison) -> Settings:
    """Returns how the finished runs were timed, what the machine did meanwhile, and what it had set."""
    return _settings(comparison.finished, _measured)


def versions(comparison: Comparison) -> Settings:
    """Returns the versions of the programs and the commit."""

    def of(entry: Entry) -> Values:
        if (machine := entry.run.result.machine) is None:
            return {}
        known = {key: getattr(machine, key) for key in ("commit", "python", "platform", "cuda", "driver")}
        return {**machine.versions, **{key: value for key, value in known.items() if value}}

    return _settings(comparison.entries, of)


def dtypes(comparison: Comparison) -> Settings:
    """Returns the dtypes of all layers as observed; without rows where none were."""
    runs = alike(observed(comparison))
    rows = []
    for names, layer_class in grouped(list(runs.values())) if runs else ():
        cells = []
        for entry in runs.values():
            different = differing(entry, names[0])
            own = layers_of(entry).get(names[0]) or {}
            cells.append([(own.get(role, ""), role in different) for role in ROLES])
        name = " .. ".join(dict.fromkeys((names[0], names[-1]))) or "the network"
        rows.append(LayerRow(name, layer_class, cells, any(differs for run in cells for _, differs in run)))
    return Settings(list(runs), rows)


def _settings(entries: Sequence[Entry], of: Callable[[Entry], Values]) -> Settings:
    """Returns the settings of runs; one column stands for all where none differs."""
    columns = [{name: _text(value) for name, value in of(entry).items()} for entry in entries]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = []
    for name in names:
        values = [column.get(name, "-") for column in columns]
        rows.append(Setting(name, values, len(set(values)) > 1))
    if any(row.differs for row in rows) or len(entries) < 2:
        return Settings([entry.label for entry in entries], rows)
    return Settings(["all runs"], [Setting(row.name, row.values[:1], False) for row in rows])


def _text(value: object) -> str:
    if isinstance(value, float):  # few digits only where they are all of them: others would hide a difference
        text = short(value, 6)
        return text if float(text) == value else repr(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _known(number: float) -> str:
    return "not known" if math.isnan(number) else short(number)


def _measured(entry: Entry) -> Values:
    machine, timing, blocks = entry.run.finished.machine, entry.run.finished.blocks.timing, entry.run.blocks
    clock = blocks["clock_mhz"].dropna()
    throttled = sorted(set(blocks["throttle"].dropna()))
    return {
        "device": machine.device_name,
        "host": machine.host,
        "cores": machine.cpu_count,
        "threads": machine.threads,
        "rounds of blocks": timing.rounds,
        "steps in a block": int(blocks["steps"].median()) if len(blocks) else 0,
        "seconds of timing": short(timing.seconds),
        "timing stopped because of": timing.stopped,
        "half width of the interval": short(timing.half_width),
        "cores that other programs kept busy, median": _known(blocks["other_cores"].median()),
        "cores that other programs kept busy, most": _known(blocks["other_cores"].max()),
        "own cores busy between turns, median": _known(blocks["cores_between_turns"].median()),
        "clock in MHz": f"{clock.min():g} to {clock.max():g}" if len(clock) else "not known",
        "throttled": ", ".join(throttled) or "no",
        "blocks that began on a settled machine": f"{int(blocks['settled'].sum())} of {len(blocks)}",
        **{f"flag {name}": value for name, value in machine.flags.items()},
        **{f"environment {name}": value for name, value in machine.environment.items()},
    }
