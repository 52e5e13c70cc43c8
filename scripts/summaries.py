"""Tables for people from ``summary.csv`` of a sweep."""

from pathlib import Path
from typing import Any

import pandas as pd

MB = 1e6
SWEEPS = ("default", "recipe", "bf16", "speed", "tasks")  # sweeps of gpu_suite.sh, the most important first


def suite_summaries(folder: Path) -> dict[str, pd.DataFrame]:
    """Returns ``SWEEP/report/summary.csv`` of each sweep that a suite has finished, by the name of the sweep."""
    paths = {name: folder / name / "report" / "summary.csv" for name in SWEEPS}
    return {name: pd.read_csv(path) for name, path in paths.items() if path.exists()}


def time_ratio(row: "pd.Series[Any]") -> str:
    """Returns the step time over the baseline's, with its 95 % interval; ``~`` marks two runs that took no turns."""
    if row["run"] == row["baseline"]:
        return "1"
    ratio, low, high = (row[key] for key in ("time_vs_baseline", "time_vs_baseline_low", "time_vs_baseline_high"))
    if pd.isna(ratio):
        return ""
    interval = "" if pd.isna(low) else f" ({low:.2f} to {high:.2f})"
    return f"{ratio:.2f}{interval}" + ("" if row["side_by_side"] else " ~")


def comparison(summary: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each run: backend, step time, memory and outcome. Empty columns are left out."""
    baselines = summary.set_index("run")["backend"]
    table = summary[["task", "backend", "precision", "engine", "step_ms_p50", "step_ms_p20", "step_ms_p80"]].copy()
    table["time / baseline"] = [time_ratio(row) for _, row in summary.iterrows()]
    table["baseline"] = summary["baseline"].map(baselines)
    table["peak MB"] = summary["peak_memory_bytes"] / MB
    table["model MB"] = summary["peak_memory_bytes_analytic"] / MB
    for name in ("final_loss", "test_accuracy", "verdict", "cause", "error"):
        table[name] = summary[name]
    return table.dropna(axis="columns", how="all")


def markdown(table: pd.DataFrame) -> str:
    """Returns the table in Markdown; numbers have four digits, and missing ones are empty cells."""

    def cell(value: Any) -> str:
        if pd.isna(value):
            return ""
        return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")

    lines = ["| " + " | ".join(map(str, table.columns)) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in table.astype(object).to_numpy()]
    return "\n".join(lines)
