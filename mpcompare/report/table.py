"""The comparison as a table: ``summary.csv`` for programs, the console for people."""

import math
from collections.abc import Sequence
from pathlib import Path

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
    copied = ("backend", "engine", "precision", "dataset", "step_ms_p20", "step_ms_p50", "step_ms_p80")
    return {
        **{key: result.get(key) for key in copied},
        "speedup_vs_baseline": entry.speedup,
        "peak_memory_bytes": result.get("peak_memory_bytes"),
        "final_loss": result.get("final_loss"),
        "max_abs_loss_diff_vs_baseline": entry.max_abs_loss_diff,
        "test_accuracy": result.get("test_accuracy"),
        "baseline": entry.baseline.folder.name if entry.baseline else None,
        "peak_memory_bytes_analytic": result.get("peak_memory_bytes_analytic"),
        "loss_scale": result.get("loss_scale"),
        "skipped_steps": result.get("skipped_steps"),
        "task": result.get("task"),
        "batch_size": result.get("batch_size"),
        "seed": result.get("seed"),
        "device_name": result.get("device_name"),
        "status": result["status"],
        "error": entry.error or None,
        "run": entry.run.folder.name,
    }


def write(comparisons: Sequence[Comparison], path: Path) -> None:
    """Writes :func:`summary` as CSV."""
    write_atomically(path, summary(comparisons).to_csv(index=False))


def show(comparisons: Sequence[Comparison]) -> None:
    """Prints a table for each comparison, and below it why runs failed, in full."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file or a pipe has no width: do not wrap at 80
    for comparison in comparisons:
        console.print(Text(comparison.title, style="bold"))
        console.print(Text(comparison.dataset))
        console.print(_table(comparison))
        for entry in comparison.entries:
            if not entry.ok:
                console.print(Text(f"{entry.label}: {entry.run.result['status']}: {entry.error}", style="red"))


def _table(comparison: Comparison) -> Table:
    labels = {id(entry.run): entry.label for entry in comparison.entries}
    baselines = list(dict.fromkeys(labels[id(e.baseline)] for e in comparison.entries if e.baseline))
    versus = baselines[0] if len(baselines) == 1 else "baseline"

    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for header in ("backend", "precision", "engine"):
        table.add_column(header)
    for header in ("ms/step p50", "p20 - p80", f"x {versus}", "peak MB", "final loss", f"max |loss - {versus}|"):
        table.add_column(header, justify="right")
    table.add_column("test acc.", justify="right")
    if len(baselines) > 1:
        table.add_column("baseline")

    for entry in comparison.entries:
        r = entry.run.result
        cells = [r["backend"], r["precision"], r.get("engine", "")]
        if entry.ok:
            cells += [
                f"{r['step_ms_p50']:.4g}",
                f"{r['step_ms_p20']:.4g} - {r['step_ms_p80']:.4g}",
                f"{entry.speedup:.2f}",
                f"{r['peak_memory_bytes'] / 1e6:.4g}",
                f"{float(r['final_loss']):.5f}",
                "baseline" if entry.baseline is entry.run else _scientific(entry.max_abs_loss_diff),
                "-" if r["test_accuracy"] is None else f"{r['test_accuracy']:.4f}",
                labels[id(entry.baseline)],
            ]
        else:
            cells.append(r["status"])
        table.add_row(*cells[: len(table.columns)], style=None if entry.ok else "red")
    return table


def _scientific(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}"
