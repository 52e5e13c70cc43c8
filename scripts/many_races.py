"""Measures the report of many races, which are copies of one with other seeds:

python scripts/many_races.py SWEEP [--races 10 30 100 1000] [--write docs/clusters/growth.txt]

SWEEP is the folder of a sweep; the race of its first run is copied. Nothing is computed in between: the report reads
records, prints its table and writes its page. Its CPU time is one process's, and hardly depends on what else the
machine does. The last row is the straight line through the last two others, at 10,000 races.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

MANY = 10_000


def copied(sweep: Path, into: Path, races: int) -> None:
    """Writes so many copies of the race of a sweep's first run, each with a seed of its own."""
    results = {path.parent: json.loads(path.read_text()) for path in sorted(sweep.glob("*/result.json"))}
    race = next(iter(results.values()))["timing"]["race"]
    for seed in range(races):
        for folder, result in results.items():
            if result["timing"]["race"] != race:
                continue
            shutil.copytree(folder, own := into / f"{seed}-{folder.name}")
            config, timing = {**result["config"], "seed": seed}, {**result["timing"], "race": f"{seed:08x}"}
            other = {"dataset_fingerprint": f"{seed:08x}", "initial_weights": f"{seed:08x}"}
            text = json.dumps({**result, "seed": seed, "config": config, "timing": timing, **other})
            (own / "result.json").write_text(text)


def measured(folder: Path) -> tuple[float, float]:
    """Returns the CPU seconds and the megabytes of the report on a folder."""
    if (process := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.execv(sys.executable, [sys.executable, "-m", "mpcompare", "report", str(folder)])
    _, status, used = os.wait4(process, 0)
    if status:
        sys.exit(f"the report on {folder} ended with status {status}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6  # Linux says KiB


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--races", type=int, nargs="+", default=[10, 30, 100, 1000])
    parser.add_argument("--write", type=Path, help="file of the table")
    asked = parser.parse_args()
    if len({*asked.races[-2:]}) < 2:
        parser.error("--races: expected two different numbers at the end, through which the line is drawn")
    lines = ["| races | CPU s | MB |", "|---|---|---|"]
    seen = []
    for races in asked.races:
        with tempfile.TemporaryDirectory(prefix="many-races-") as name:
            copied(asked.sweep, Path(name), races)
            cpu_s, megabytes = measured(Path(name))
        seen.append((races, cpu_s, megabytes))
        lines.append(f"| {races} | {cpu_s:.1f} | {megabytes:.0f} |")
        print(lines[-1], flush=True)
    (few, less, small), (more, longer, large) = seen[-2:]
    grown = [now + (now - before) / (more - few) * (MANY - more) for before, now in ((less, longer), (small, large))]
    lines.append(f"| {MANY:,}, extrapolated | {grown[0]:.0f} | {grown[1]:.0f} |")
    print(lines[-1])
    if asked.write:
        asked.write.parent.mkdir(exist_ok=True)
        asked.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
