"""The comparison as a table: ``summary.csv`` for programs, the console for people."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpcompare.records import write_atomically
from mpcompare.report.comparison import Comparison, Entry


def summary(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """A row a run; times in ms, memory in bytes; empty cells for what a failed run does not have."""
    return pd.DataFrame([_row(entry) for comparison in comparisons for entry in comparison.entries])


def _row(entry: Entry) -> dict[str, object]:
    result = entry.run.result
    difference = entry.max_abs_loss_diff  # nan of a run that diverged is a result, not an empty cell
    copied = ("backend", "engine", "precision", "dataset", "step_ms_p20", "step_ms_p50", "step_ms_p80")
    return {
        **{key: result.get(key) for key in copied},
        "speedup_vs_baseline": entry.speedup,
        "peak_memory_bytes": result.get("peak_memory_bytes"),
        "final_loss": result.get("final_loss"),
        "max_abs_loss_diff_vs_baseline": str(difference) if entry.ok and not math.isfinite(difference) else difference,
        "test_accuracy": result.get("test_accuracy"),
        "baseline": entry.baseline.name if entry.baseline else None,
        "peak_memory_bytes_analytic": result.get("peak_memory_bytes_analytic"),
        "loss_scale": result.get("loss_scale"),
        "skipped_steps": result.get("skipped_steps"),
        "task": result.get("task"),
        "batch_size": result.get("batch_size"),
        "seed": result.get("seed"),
        "device_name": result.get("device_name"),
        "status": result["status"],
        "error": entry.error or None,
        "run": entry.run.name,
    }


def write(comparisons: Sequence[Comparison], path: Path) -> None:
    """Writes :func:`summary` as CSV."""
    write_atomically(path, lambda unfinished: summary(comparisons).to_csv(unfinished, index=False))


def show(comparisons: Sequence[Comparison]) -> None:
    """Prints a table for each comparison, and below it why runs failed, in full."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file or a pipe has no width: do not wrap at 80
    for comparison in comparisons:
        console.print(Text(comparison.title, style="bold"))
        console.print(Text(comparison.dataset))
        console.print(_table(comparison, narrow=console.width < 130))
        for entry in comparison.entries:
            if not entry.ok:
                console.print(Text(f"{entry.label}: {entry.run.result['status']}: {entry.error}", style="red"))


def _table(comparison: Comparison, narrow: bool) -> Table:
    """All columns, or, where the terminal is narrow, those that matter most; summary.csv has them all."""
    labels = {id(entry.run): entry.label for entry in comparison.entries}
    baselines = list(dict.fromkeys(labels[id(e.baseline)] for e in comparison.entries if e.baseline))
    versus = baselines[0] if len(baselines) == 1 else "baseline"
    columns: dict[str, Callable[[Entry, dict[str, Any]], str]] = {
        "backend": lambda e, r: r["backend"],
        "precision": lambda e, r: r["precision"],
        "engine": lambda e, r: r.get("engine", ""),
        "ms/step p50": lambda e, r: f"{r['step_ms_p50']:.4g}",
        "p20 - p80": lambda e, r: f"{r['step_ms_p20']:.4g} - {r['step_ms_p80']:.4g}",
        f"x {versus}": lambda e, r: f"{e.speedup:.2f}",
        "peak MB": lambda e, r: f"{r['peak_memory_bytes'] / 1e6:.4g}",
        "final loss": lambda e, r: f"{float(r['final_loss']):.5f}",
        f"max |loss - {versus}|": lambda e, r: "baseline" if e.is_baseline else f"{e.max_abs_loss_diff:.1e}",
        "test acc.": lambda e, r: "-" if r["test_accuracy"] is None else f"{r['test_accuracy']:.4f}",
    }
    if len(baselines) > 1:
        columns["baseline"] = lambda e, r: labels[id(e.baseline)]
    if narrow:
        for header in ("engine", "p20 - p80", "final loss", "test acc."):
            del columns[header]
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for header in columns:
        words = header in ("backend", "precision", "engine", "baseline")
        table.add_column(header, justify="left" if words else "right", no_wrap=not header.startswith("max"))
    for entry in comparison.entries:
        result = entry.run.result
        cells = list(columns.values())
        if entry.ok:
            table.add_row(*(cell(entry, result) for cell in cells))
        else:
            table.add_row(result["backend"], result["precision"], result["status"], style="red")
    return table
