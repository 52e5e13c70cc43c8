"""Keeps what gpu_suite.sh found on a GPU: docs/results/GPU, with a page that is written from the files alone.

python scripts/keep_results.py OUT/results.tar.gz [--to docs/results]
"""

import argparse
import json
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

# What is worth keeping of a finished suite, by its place there; records of single runs are not.
KEPT = ("machine.json", "*.csv", "*.png", "report/*.csv", "report/*.json", "report/*.png")


def keep(archive: Path, to: Path) -> Path:
    """Unpacks ``archive`` into a folder of its GPU's name in ``to``; returns that folder."""
    with tempfile.TemporaryDirectory() as name:
        unpacked = Path(name)
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")
        machine = json.loads((unpacked / "machine.json").read_text())
        folder = to / re.sub(r"[^a-z0-9]+", "-", machine["device_name"].lower()).strip("-")
        shutil.rmtree(folder, ignore_errors=True)  # the files of one suite, never of two
        folder.mkdir(parents=True)
        for pattern in KEPT:
            for file in sorted(unpacked.glob(pattern)):
                shutil.copyfile(file, folder / file.name)
    (folder / "README.md").write_text(page(folder, machine))
    return folder


def markdown(table: pd.DataFrame) -> str:
    """A table; numbers with four digits, nothing where there is none."""

    def cell(value: Any) -> str:
        if pd.isna(value):
            return ""
        return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")

    lines = ["| " + " | ".join(map(str, table.columns)) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in table.astype(object).to_numpy()]
    return "\n".join(lines)


def page(folder: Path, machine: dict[str, Any]) -> str:
    gpu = machine["gpu"] or {}
    smi = gpu.get("nvidia_smi") or {}
    facts = {
        "date": machine["date"],
        "commit": machine["commit"],
        "driver": machine["driver"],
        "torch": machine["versions"]["torch"],
        "CUDA of torch": machine["cuda"],
        "nvcc": machine["nvcc"],
        "Python": machine["python"],
        "compute capability": gpu.get("capability"),
        "power limit in W": smi.get("power.limit"),
        "highest SM clock in MHz": smi.get("clocks.max.sm"),
        "data": machine["dataset"],
    }
    parts = [f"# {machine['device_name']}", "`scripts/gpu_suite.sh` wrote these files; this page is made from them."]
    parts.append(markdown(pd.DataFrame([(k, v) for k, v in facts.items() if v is not None], columns=["", " "])))
    parts += _tables(folder)
    figures = sorted(file.name for file in folder.glob("*.png"))
    if figures:
        parts.append("## Figures")
        parts += [f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in figures]
    return "\n\n".join(parts) + "\n"


def _tables(folder: Path) -> list[str]:
    """A heading and a table for each file that is there."""
    found = []
    if (path := folder / "summary.csv").exists():
        found += ["## Comparison", markdown(_comparison(pd.read_csv(path)))]
    if (path := folder / "steps.csv").exists():
        table = pd.read_csv(path)
        found += ["## Steps, in turns in one process", markdown(table[table["unit"] != "MHz"])]
    if (path := folder / "memory.csv").exists():
        found += ["## Memory in MB", markdown(pd.read_csv(path))]
    if (path := folder / "roofline.csv").exists():
        table = pd.read_csv(path)[["kind", "backend", "name", "precision", "ms", "TFLOP/s", "TB/s", "share of roof"]]
        found += ["## Roofline", markdown(table)]
    if (path := folder / "ncu.csv").exists() and len(table := pd.read_csv(path)):
        found += ["## Kernels of a step of fused", markdown(table)]
    if (path := folder / "parts.csv").exists():
        found += ["## What ran", markdown(pd.read_csv(path))]
    return found


def _comparison(summary: pd.DataFrame) -> pd.DataFrame:
    megabytes = {"peak MB": "peak_memory_bytes", "model MB": "peak_memory_bytes_analytic"}
    table = summary[["backend", "precision", "engine", "step_ms_p50", "step_ms_p20", "step_ms_p80"]].copy()
    table["x baseline"] = [
        "" if pd.isna(ratio) else f"{ratio:.2f}" + ("" if pd.isna(low) else f" ({low:.2f} to {high:.2f})")
        for ratio, low, high in summary[["speedup_vs_baseline", "speedup_low", "speedup_high"]].to_numpy()
    ]
    table["baseline"] = summary["baseline"]
    for name, column in megabytes.items():
        table[name] = summary[column] / 1e6
    for name in ("final_loss", "test_accuracy", "verdict", "cause", "error"):
        table[name] = summary[name]
    return table.dropna(axis="columns", how="all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--to", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    try:
        print(keep(args.archive, args.to))
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        sys.exit(f"{args.archive}: not what gpu_suite.sh writes ({error})")


if __name__ == "__main__":
    main()
