"""Races bad backends with two good ones, and looks each time whether the others have lost anything:

python scripts/bad_backends.py                      # all of them, some minutes
python scripts/bad_backends.py deed=aborts          # one
python scripts/bad_backends.py --every 10           # a tenth, as in a slow test

A sweep of amp, a bad backend (``bad_backend.py``) and fp32 must end with a row of each, a verdict on the two good ones,
the page and its figures. No process is left, and no temporary file. No traceback is printed except the bad backend's
own, and no control character of its texts.
"""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bad_backend import ANSWERS, DEEDS, METHODS
from faults_command import left_of

COMMAND = (
    *("data=digits", "task.model.hidden=[16]", "task.batch_size=64", "task.samples=640", "train.warmup_steps=1"),
    *("train.steps=8", "train.checkpoint_every=4", "eval.every=4", "measure.budget_s=0.5", "measure.block_s=0.01"),
    *("inference.budget_s=0.01", "backend=amp,bad,fp32"),
)
LONGEST_S = 240
FIGURES = ("loss.png", "memory.png", "glance.png")


def every() -> list[str]:
    """Returns the names of all bad backends."""
    answers = [f"{method}={answer}" for method in METHODS for answer in ANSWERS]
    return [f"deed={deed}" for deed in DEEDS] + answers


def options_of(name: str) -> dict[str, str | int]:
    """Returns a bad backend's options. It goes wrong in its first step, or later, by turns."""
    what, _, how = name.partition("=")
    at = every().index(name) % 3 * 2
    return {"deed": how, "at": at} if what == "deed" else {"method": what, "answer": how, "at": at}


def what_it_cost(name: str, folder: Path) -> str:
    """Races one bad backend. Returns what the others have lost; empty if nothing."""
    groups, runs, temporary = folder / "conf" / "backend", folder / "runs", folder / "tmp"
    groups.mkdir(parents=True)
    temporary.mkdir()
    (groups / "bad.yaml").write_text(json.dumps({"_target_": "bad_backend.Bad", **options_of(name)}))
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "PYTHONPATH": _path(), "COLUMNS": "200"},
        "BAD_BACKEND_FOLDER": str(runs / "1-bad-auto"),
    }
    sweep = subprocess.Popen(
        [sys.executable, "-m", "mpcompare", "-m", *COMMAND, f"hydra.sweep.dir={runs}",
         f"hydra.searchpath=[file://{folder / 'conf'}]"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, env=environment, cwd=folder,
    )  # fmt: skip
    try:
        said = sweep.communicate(timeout=LONGEST_S)[0]
    except subprocess.TimeoutExpired:
        return f"it hangs for {LONGEST_S} s"
    finally:
        left = _left(sweep.pid)
    lost = _lost(runs / "report")
    if sweep.returncode not in (0, 1):
        lost.append(f"exit code {sweep.returncode}")
    before_traces = [part.rstrip().splitlines()[-1] for part in said.split("Traceback")[:-1]]
    if not all(line.startswith(("1-bad-auto: ", "During handling of the above")) for line in before_traces):
        lost.append("a traceback of something else")
    if "\x1b" in said:
        lost.append("control characters in the terminal")
    lost += [f"left the process {each}" for each in left]
    lost += [f"left {path.relative_to(folder)}" for path in sorted(temporary.iterdir())]
    return "; ".join(lost) + (f"\n{said}" if lost else "")


def _path() -> str:
    return os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))


def _left(session: int) -> list[str]:
    """Returns the processes that a sweep has left, some seconds after its end, and ends them."""
    deadline = time.monotonic() + 5
    while (left := left_of(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        os.killpg(session, signal.SIGKILL)
    return left


def _lost(report: Path) -> list[str]:
    """Returns what a report lacks."""
    lost = [name for name in ("index.html", "summary.md", "verdict.json", *FIGURES) if not (report / name).is_file()]
    rows = {}
    if (report / "summary.csv").is_file():
        with (report / "summary.csv").open(newline="") as lines:
            rows = {row["run"]: row for row in csv.DictReader(lines)}
    if len(rows) != 3:
        lost.append(f"rows of {list(rows)} alone")
    for name in ("0-amp-auto", "2-fp32-auto"):
        row = rows.get(name, {})
        if row.get("status") != "ok" or not row.get("verdict", "").startswith("reference"):
            lost.append(f"{name} is {row.get('status')}, {row.get('verdict')}: {row.get('error')}")
    return [f"no {each}" if each.count(".") == 1 else each for each in lost]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of bad backends (default: all)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many sweeps at once")
    asked = parser.parse_args()
    names = (asked.names or every())[:: asked.every]
    failed, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bad-") as folder, ThreadPoolExecutor(asked.jobs) as pool:
        costs = pool.map(lambda name: what_it_cost(name, Path(folder) / str(names.index(name))), names)
        for name, cost in zip(names, costs, strict=True):
            failed += bool(cost)
            if cost:
                print(f"{name}: {cost}", flush=True)
    print(f"{len(names) - failed} of {len(names)} bad backends cost nothing ({time.monotonic() - began:.0f} s)")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
