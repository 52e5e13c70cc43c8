"""Prints the results of gpu_suite.sh as tables, the most important last, from the files of a finished suite alone.

    python scripts/suite_tables.py FOLDER

It also writes into FOLDER the two tables that are not files yet: memory.csv and ncu.csv.
"""

import argparse
import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from summaries import comparison, suite_summaries

from mpcompare.cost import allocated_bytes
from mpcompare.report.runs import Run, find_runs


def show(table: pd.DataFrame) -> str:
    """Returns the table as text, with four digits and without trailing blanks."""
    text = table.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-")
    return "\n".join(line.rstrip() for line in text.splitlines())


def compared(folder: Path) -> str:
    """Returns the tables of all sweeps, the default sweep last."""
    each = reversed(suite_summaries(folder).items())
    return "\n\n".join(f"{name}\n{show(comparison(table))}" for name, table in each)


def memory(runs: list[Run]) -> pd.DataFrame:
    """Returns the memory of each finished run in MB: the analytic model, the measured peak, and named workspaces."""
    rows = []
    for run in runs:
        if run.result.status != "ok":
            continue
        result, used = run.finished, run.finished.memory
        model = used.memory_model
        predicted = allocated_bytes(model) if model else None
        workspaces = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in model.get("workspace", {}).items())
        rows.append(
            {
                "task": result.task,
                "backend": result.backend,
                "precision": result.precision,
                "model": predicted and predicted / 1e6,
                "measured": used.peak_memory_bytes / 1e6,
                "difference %": predicted and 100 * (used.peak_memory_bytes / predicted - 1),
                "reserved": (used.memory_reserved_bytes or 0) / 1e6,
                "graph pool": (used.graph_pool_bytes or 0) / 1e6,
                "workspace": (used.workspace_bytes or 0) / 1e6,
                "by name": workspaces or "-",
            }
        )
    return pd.DataFrame(rows)


NCU = {
    "gpu__time_duration.sum": "us",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm %",
}


def kernels(text: str) -> pd.DataFrame:
    """Returns a row for each kernel from ``ncu --csv --print-units base``, whose output has a row for each metric."""
    lines = text.splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, dict[str, object]] = {}
    for row in csv.DictReader(lines[start:]):
        value = float(row["Metric Value"].replace(",", ""))
        name = NCU[row["Metric Name"]]
        kernel = found.setdefault(row["ID"], {"kernel": short(row["Kernel Name"])})
        kernel[name] = value / 1e3 if name == "us" else value  # nanoseconds
    return pd.DataFrame(list(found.values()), columns=["kernel", *NCU.values()])


def short(kernel: str) -> str:
    """Returns a kernel's name without return type, namespaces and arguments, at most 60 characters of it."""
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void ", "", kernel)
    return re.split(r"[<(]", name)[0].split("::")[-1][:60]


def sanitized(log: str) -> str:
    """Returns the sanitizer's own summary, or its findings up to the moment when it was stopped."""
    lines = [line.removeprefix("=========").strip() for line in log.splitlines() if line.startswith("=========")]
    summary = [line for line in lines if "SUMMARY" in line]
    if summary:
        return summary[-1]
    found = [line for line in lines if re.match(r"Invalid|Error|ERROR|Program hit|.*hazard", line)]
    return f"no summary; findings until it ended: {len(found)}" + "".join(f"\n{line}" for line in found[:5])


def profile(folder: Path) -> str:
    """Writes ``ncu.csv`` and returns it as text, or the end of the log if it holds no kernel."""
    log = (folder / "ncu.log").read_text()
    found = kernels(log)
    found.to_csv(folder / "ncu.csv", index=False)
    return show(found) if len(found) else log.strip()[-500:]


def operators(folder: Path) -> str:
    """Returns the operators in fp16."""
    table = pd.read_csv(folder / "ops.csv")
    return show(table[table["dtype"] == "fp16"])


def roof(folder: Path) -> str:
    """Returns the points of the roofline."""
    columns = ["kind", "backend", "name", "precision", "ms", "intensity", "TFLOP/s", "TB/s", "share of roof"]
    return show(pd.read_csv(folder / "roofline.csv")[columns])


def memory_table(folder: Path) -> str:
    """Writes ``memory.csv`` and returns it as text."""
    table = memory([run for name in suite_summaries(folder) for run in find_runs([folder / name])])
    table.to_csv(folder / "memory.csv", index=False)
    return show(table)


# Each section has a title, a file without which there is nothing to show, and a function that shows it. The most
# important section comes last.
SECTIONS: tuple[tuple[str, str, Callable[[Path], str]], ...] = (
    ("kernels of a step of fused, by ncu", "ncu.log", profile),
    ("memcheck", "logs/memcheck.log", lambda folder: sanitized((folder / "logs/memcheck.log").read_text())),
    ("racecheck", "logs/racecheck.log", lambda folder: sanitized((folder / "logs/racecheck.log").read_text())),
    ("operators in fp16; ops.csv has the others", "ops.csv", operators),
    ("roofline, work counted from shapes", "roofline.csv", roof),
    ("memory in MB", "*/*/result.json", memory_table),
    ("comparison", "*/report/summary.csv", compared),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    failed = []
    for title, file, shown in SECTIONS:
        if not any(folder.glob(file)):
            continue
        try:
            text = shown(folder)
        except Exception as error:  # one table is missing, and the others are still shown
            failed.append(title)
            text = f"cannot be shown: {type(error).__name__}: {error}"
        print(f"\n== {title}\n{text}", flush=True)
    if failed:
        sys.exit(f"not shown: {', '.join(failed)}")


if __name__ == "__main__":
    main()
