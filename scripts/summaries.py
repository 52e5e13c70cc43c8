"""What ``summary.csv`` of a sweep says, as tables that people read."""

from pathlib import Path
from typing import Any

import pandas as pd

MB = 1e6
SWEEPS = ("default", "bf16", "speed", "tasks")  # of gpu_suite.sh, the most important first


def suite_summaries(folder: Path) -> dict[str, pd.DataFrame]:
    """``SWEEP/report/summary.csv`` of each sweep that a suite has finished, by its name."""
    paths = {name: folder / name / "report" / "summary.csv" for name in SWEEPS}
    return {name: pd.read_csv(path) for name, path in paths.items() if path.exists()}


def times_baseline(row: "pd.Series[Any]") -> str:
    """How many times as fast as its baseline, with the 95 % interval; ``~`` where the two took no turns."""
    if row["run"] == row["baseline"]:
        return "1"
    ratio, low, high = (row[key] for key in ("speedup_vs_baseline", "speedup_low", "speedup_high"))
    if pd.isna(ratio):
        return ""
    interval = "" if pd.isna(low) else f" ({low:.2f} to {high:.2f})"
    return f"{ratio:.2f}{interval}" + ("" if row["side_by_side"] else " ~")


def comparison(summary: pd.DataFrame) -> pd.DataFrame:
    """A row a run: who, how long is a step, how much memory, what it led to; columns that hold nothing left out."""
    baselines = summary.set_index("run")["backend"]
    table = summary[["task", "backend", "precision", "engine", "step_ms_p50", "step_ms_p20", "step_ms_p80"]].copy()
    table["x baseline"] = [times_baseline(row) for _, row in summary.iterrows()]
    table["baseline"] = summary["baseline"].map(baselines)
    table["peak MB"] = summary["peak_memory_bytes"] / MB
    table["model MB"] = summary["peak_memory_bytes_analytic"] / MB
    for name in ("final_loss", "test_accuracy", "verdict", "cause", "error"):
        table[name] = summary[name]
    return table.dropna(axis="columns", how="all")


def markdown(table: pd.DataFrame) -> str:
    """Numbers with four digits, nothing where there is none."""

    def cell(value: Any) -> str:
        if pd.isna(value):
            return ""
        return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")

    lines = ["| " + " | ".join(map(str, table.columns)) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in table.astype(object).to_numpy()]
    return "\n".join(lines)
