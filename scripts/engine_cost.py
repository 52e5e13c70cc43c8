"""Measures the time that an engine adds to each race, with a sweep of six small races, one after the other:

python scripts/engine_cost.py                    # processes of this machine, by submitit
python scripts/engine_cost.py --executor slurm   # jobs of a SLURM of one node, which is started for that

That time goes from the last record of a race to the first line of the next race. In it the processes of the race end,
the engine looks at them and submits the next race, and a new Python starts Hydra. The import of torch is not in it: it
belongs to a race, and a sweep in one process imports torch once for all. The machine's load is printed, too, because
load makes all of this longer.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from cluster_kills import CLI, engine

SWEEP = (
    *("data=digits", "task.model.hidden=[16]", "task.batch_size=32", "task.samples=320", "train.warmup_steps=1"),
    *("train.steps=4", "measure.budget_s=0.2", "measure.block_s=0.01", "inference.enabled=false"),
    *("verdict.enabled=false", "report.formats=[]", "backend=amp,fp32", "seed=0,1,2,3,4,5", "hydra/launcher=slurm"),
)
FIRST = re.compile(r"\[([^]]+)\]\[HYDRA\] The host")  # the first line of mpcompare run


def gaps_s(folder: Path) -> list[float]:
    """Returns the seconds between races of a finished sweep."""
    logs = [path.read_text() for path in folder.glob("submitit/*_log.out")]
    starts = sorted(datetime.strptime(FIRST.findall(log)[0], "%Y-%m-%d %H:%M:%S,%f").timestamp() for log in logs)
    ends: dict[str, float] = {}  # by race
    for path in folder.glob("*/result.json"):
        race = json.loads(path.read_text())["timing"]["race"]
        ends[race] = max(ends.get(race, 0.0), path.stat().st_mtime)
    return [start - end for start, end in zip(starts[1:], sorted(ends.values()), strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--executor", choices=("local", "slurm"), default="local")
    executor = parser.parse_args().executor
    with tempfile.TemporaryDirectory(prefix="engine-cost-") as name, engine(executor):
        folder = Path(name) / "sweep"
        command = [*CLI, "-m", *SWEEP, f"hydra.launcher.executor={executor}", f"hydra.sweep.dir={folder}"]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(ended.stderr)
        gaps = gaps_s(folder)
    each = ", ".join(f"{gap:.2f}" for gap in gaps)
    print(
        f"{executor}: {statistics.median(gaps):.2f} s between two races (median of {each}), load {os.getloadavg()[0]}"
    )


if __name__ == "__main__":
    main()
