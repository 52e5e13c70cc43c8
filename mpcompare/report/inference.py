"""What the trained networks are worth in each precision: the ``inference`` of the records as a table."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import rich.box
from rich.table import Table

from mpcompare.records import write_atomically
from mpcompare.report.comparison import Comparison, Entry

Row = Mapping[str, Any]
SCORES = ("test acc.", "test loss")  # the columns that are no costs


def rows_of(entry: Entry) -> dict[str, Row]:
    """By way; empty where none was tried."""
    return (entry.run.result.get("inference") or {}).get("ways", {}) if entry.ok else {}


def measured(comparison: Comparison) -> list[Entry]:
    """The runs of which something is known."""
    return [entry for entry in comparison.entries if rows_of(entry)]


def speedup(row: Row, rows: Mapping[str, Row]) -> float | None:
    """Latency in fp32 over that of ``row``; None where either is missing."""
    mine, theirs = (r.get("latency_ms") for r in (row, rows.get("fp32", {})))
    return theirs / mine if mine and theirs else None


def table(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """A row for each way of each run; times in ms, memory in bytes."""
    keys = ("test_accuracy", "test_loss", "latency_ms", "latency_ms_p20", "latency_ms_p80", "samples_per_s",
            "peak_memory_bytes", "weight_bytes", "unavailable")  # fmt: skip
    found = [
        {
            **{"comparison": c.title, "run": e.run.name, "label": e.label, "way": way},
            **{"batch_size": e.run.result["inference"]["batch_size"]},
            **{key: row.get(key) for key in keys},
            "speedup_vs_fp32": speedup(row, rows_of(e)),
        }
        for c in comparisons
        for e in measured(c)
        for way, row in rows_of(e).items()
    ]
    return pd.DataFrame(found)


def write(comparisons: Sequence[Comparison], path: Path) -> None:
    """Writes :func:`table` as CSV, if any run has one."""
    if any(map(measured, comparisons)):
        write_atomically(path, lambda unfinished: table(comparisons).to_csv(unfinished, index=False))


def shown(comparison: Comparison, narrow: bool) -> Table:
    """For a console: a row for each way of each run, ``-`` for what is not known. Costs that a race measured once stand
    in the rows of its first run only."""
    columns: dict[str, Callable[[Row, Mapping[str, Row]], str]] = {
        "test acc.": lambda r, _: _number(r.get("test_accuracy"), ".4f"),
        "test loss": lambda r, _: _number(r.get("test_loss"), ".5f"),
        "ms/batch p50": lambda r, _: _number(r.get("latency_ms"), ".4g"),
        "p20 - p80": lambda r, _: " - ".join(_number(r.get(f"latency_ms_p{p}"), ".4g") for p in (20, 80)),
        "x fp32": lambda r, rows: _number(speedup(r, rows), ".2f"),
        "samples/s": lambda r, _: _number(r.get("samples_per_s"), ".4g"),
        "peak MB": lambda r, _: _number(r.get("peak_memory_bytes"), ".4g", 1e6),
        "weights MB": lambda r, _: _number(r.get("weight_bytes"), ".4g", 1e6),
    }
    for header in ("test loss", "p20 - p80", "samples/s") if narrow else ():
        del columns[header]
    entries = measured(comparison)
    sizes = dict.fromkeys(str(entry.run.result["inference"]["batch_size"]) for entry in entries)
    result = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    result.add_column(f"inference, batch {'/'.join(sizes)}", no_wrap=True)
    result.add_column("in")
    for header in columns:
        result.add_column(header, justify="right", no_wrap=True)
    for entry, again in zip(entries, costs_again(entries), strict=True):
        for place, (way, row) in enumerate(rows_of(entry).items()):
            why = f" (unavailable: {row['unavailable']})" if "unavailable" in row else ""
            cells = [cell(row, rows_of(entry)) for cell in columns.values()]
            if again:
                cells = [text if header in SCORES else "" for header, text in zip(columns, cells, strict=True)]
            result.add_row("" if place else entry.label, way + why, *cells)
    return result


def lines(comparison: Comparison) -> list[str]:
    """Why the costs of some runs are not shown."""
    if not any(costs_again(measured(comparison))):
        return []
    return ["inference: time and memory do not depend on who trained, and a race measures them once"]


def costs_again(entries: Sequence[Entry]) -> list[bool]:
    """Whether the costs of each are an earlier one's."""
    costs = [[row.get("latency_ms") for row in rows_of(entry).values()] for entry in entries]
    return [mine in costs[:place] for place, mine in enumerate(costs)]


def _number(value: Any, form: str, unit: float = 1.0) -> str:
    """``-`` for None. What is not finite is a word in a record."""
    return "-" if value is None else format(float(value) / unit, form)
