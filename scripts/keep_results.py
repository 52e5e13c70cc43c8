"""Keeps the results of gpu_suite.sh in docs/results/GPU, with a page that is written from these files alone.

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
from summaries import SWEEPS, comparison, markdown, suite_summaries

# The files of a finished suite that are kept; records of single runs are not.
KEPT = ("machine.json", "*.csv", "*.png", "*/report/*.csv", "*/report/*.json", "*/report/*.png")


def keep(archive: Path, to: Path) -> Path:
    """Unpacks ``archive`` into a folder in ``to`` that has the name of its GPU; returns that folder."""
    with tempfile.TemporaryDirectory() as name:
        unpacked = Path(name)
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")
        machine = json.loads((unpacked / "machine.json").read_text())
        folder = to / re.sub(r"[^a-z0-9]+", "-", machine["device_name"].lower()).strip("-")
        shutil.rmtree(folder, ignore_errors=True)  # a folder holds the files of one suite, never of two
        folder.mkdir(parents=True)
        for pattern in KEPT:
            for file in sorted(unpacked.glob(pattern)):
                kept = folder / file.relative_to(unpacked)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, kept)
    (folder / "README.md").write_text(page(folder, machine))
    return folder


def page(folder: Path, machine: dict[str, Any]) -> str:
    """Returns the page, in Markdown: the machine, the tables and the figures that are in ``folder``."""
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
    figures = sorted(folder.glob("*.png"))
    for name in SWEEPS:
        figures += sorted(folder.glob(f"{name}/report/*.png"))
    if figures:
        parts.append("## Figures")
        parts += [f"![{file.stem.replace('_', ' ')}]({file.relative_to(folder)})" for file in figures]
    return "\n\n".join(parts) + "\n"


def _tables(folder: Path) -> list[str]:
    """Returns a heading and a table for each file that is there."""
    found = []
    for name, summary in suite_summaries(folder).items():
        found += [f"## Sweep {name}", markdown(comparison(summary))]
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
