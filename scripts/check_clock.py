"""Checks the harness itself: the truth of its ratios, its cost, and that it survives the death of an entrant.

    python scripts/check_clock.py same       races amp against itself under another name; the ratio should be 1
    python scripts/check_clock.py planted    races amp against an amp that wastes 5 % of its step; 5 % should be found
    python scripts/check_clock.py overhead   times the harness's loops and a bare loop
    python scripts/check_clock.py kill       kills an entrant at a random moment; every sweep should end in a report

Options: --sweeps 20, and overrides for the sweeps. Without overrides, ``planted`` races the default task on digits, a
step of half a second, and the others take data=digits task.batch_size=512 task.model.hidden=[1024], a step of some
milliseconds. Nothing else should run on the machine. The exit code is 1 if a bar is missed.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from backend_of import mnist_mlp

from mpcompare import loss_scale
from mpcompare.backends.amp import Amp
from mpcompare.contract import Stepper
from mpcompare.entrant.rows import Rows
from mpcompare.entrant.timing import time_block
from mpcompare.entrant.training import WRITE_EVERY_S
from mpcompare.instruments.clock import CpuClock
from mpcompare.race.intervals import interval
from mpcompare.records import RunRecorder
from mpcompare.tasks.data import batches
from mpcompare.tasks.data.generated import digits

WASTE = 0.05


class Slow(Amp):
    """The backend ``amp``, with a sleep of 5 % at the end of each step.

    The planted 5 % are exact for long steps only: a sleep takes a little more than it should, and the threads that
    compute fall asleep meanwhile. A step of some milliseconds becomes slower by more than 5 %, with a sleep or with a
    busy wait, also within one process.
    """

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.began = time.perf_counter()
        return super().forward(x, y)

    def update(self) -> None:
        super().update()
        time.sleep(WASTE * (time.perf_counter() - self.began))


def sweep(folder: Path, backends: list[str], overrides: list[str]) -> subprocess.Popen[str]:
    """Starts a sweep over ``backends``, among them ``again`` (amp) and ``slow``, into ``folder/sweep``."""
    conf = folder / "conf" / "backend"
    conf.mkdir(parents=True)
    (conf / "again.yaml").write_text("_target_: mpcompare.backends.amp.Amp\n")
    (conf / "slow.yaml").write_text("_target_: check_clock.Slow\n")
    command = [sys.executable, "-m", "mpcompare", "--config-dir", str(conf.parent), "-m"]
    command += [f"backend={','.join(backends)}", f"hydra.sweep.dir={folder / 'sweep'}", *overrides]
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ratios(opponent: str, sweeps: int, overrides: list[str]) -> pd.DataFrame:
    """Runs sweeps of amp and ``opponent``; returns the ratios of the opponent's time to amp's, with intervals."""
    rows = []
    for number in range(1, sweeps + 1):
        with tempfile.TemporaryDirectory() as name:
            backends = ["amp", opponent] if number % 2 else [opponent, "amp"]
            process = sweep(Path(name), backends, overrides)
            output, _ = process.communicate()
            if process.returncode:
                sys.exit(output)
            table = pd.read_csv(Path(name) / "sweep" / "report" / "summary.csv").set_index("backend")
        found = table.loc[opponent]
        median, low, high = found[["time_vs_baseline", "time_vs_baseline_low", "time_vs_baseline_high"]]
        rows.append({"ratio": median, "low": low, "high": high, "rounds": found["rounds"], "stopped": found["stopped"]})
        print(
            f"{number:3}  {median:.4f}  ({low:.4f} to {high:.4f})  {found['rounds']} rounds, {found['stopped']}",
            flush=True,
        )
    return pd.DataFrame(rows)


def same(sweeps: int, overrides: list[str]) -> bool:
    """Races amp against itself; passes if 1 is in 90 % of the intervals and the median is within 2 % of 1."""
    found = ratios("again", sweeps, overrides)
    inside = int(((found["low"] <= 1) & (found["high"] >= 1)).sum())
    median, worst = found["ratio"].median(), (found["ratio"] - 1).abs().max()
    print(
        f"amp / amp: 1 is in the 95 % interval of {inside} of {sweeps}; median {median:.4f}, farthest {worst:.4f} away"
    )
    return inside >= 0.9 * sweeps and abs(median - 1) <= 0.02


def planted(sweeps: int, overrides: list[str]) -> bool:
    """Races amp against :class:`Slow`; passes if every sweep finds ``WASTE`` within 1.5 points."""
    # The default interval, 2 % to either side, is too wide for 1.5 points.
    found = ratios("slow", sweeps, ["measure.rel_ci=0.01", "measure.budget_s=120", *overrides])["ratio"] - 1
    near = int(((found - WASTE).abs() <= 0.015).sum())
    spread = f"{100 * found.min():.2f} % to {100 * found.max():.2f} %"
    planted = f"planted {100 * WASTE:.1f} %, found {100 * found.median():.2f} % ({spread})"
    print(f"{planted}; {near} of {sweeps} within 1.5 points")
    return near == sweeps


def overhead(sweeps: int, overrides: list[str]) -> bool:
    """Times a step in the harness's loops and in a bare loop, in turns; ``overrides`` are ignored.

    A cost passes unless the whole of its interval lies above the bar.
    """
    good = True
    for hidden, batch_size, steps in ((8192, 8192, 3), (32, 64, 5000)):
        task = mnist_mlp(batch_size, hidden)
        backend = Amp(task.new_model(0, torch.device("cpu")), task, "bf16", loss_scale.auto("bf16"))
        stream, clock = ([batch] for batch in batches(digits(0, 10 * batch_size), batch_size)), CpuClock()
        stepper = Stepper(backend, task.new_rates())

        def bare() -> None:
            for ((x, y),) in islice(stream, steps):  # noqa: B023
                backend.forward(x, y)  # noqa: B023
                backend.backward()  # noqa: B023
                backend.unscale()  # noqa: B023
                backend.clip()  # noqa: B023
                backend.step(0.01)  # noqa: B023
                backend.update()  # noqa: B023

        def recorded() -> None:
            with tempfile.TemporaryDirectory() as name:
                rows = Rows(RunRecorder(Path(name), {}), clock, clip_norm=None, warmup_steps=0)  # noqa: B023
                written = time.monotonic()
                for batch in islice(stream, steps):  # noqa: B023
                    rows.take_step(stepper, batch)  # noqa: B023
                    if time.monotonic() - written > WRITE_EVERY_S:
                        rows.write()
                        written = time.monotonic()
                rows.write()

        def timed() -> None:
            time_block(stepper, stream, steps, clock)  # noqa: B023

        loops: dict[str, Callable[[], None]] = {"bare": bare, "training": recorded, "timed block": timed}
        times: dict[str, list[float]] = {name: [] for name in loops}
        for round_ in range(sweeps + 1):
            for name in list(loops)[round_ % 3 :] + list(loops)[: round_ % 3]:
                start = time.perf_counter()
                loops[name]()
                if round_:
                    times[name].append((time.perf_counter() - start) * 1e3 / steps)
        step = float(np.median(times["bare"]))
        for name in ("training", "timed block"):
            cost = interval(np.array(times[name]) - np.array(times["bare"]))
            bar = 0.01 * step if hidden == 8192 else 0.050
            good &= not cost.low > bar
            unknown = ", too wide to tell whether that is below the bar" if cost.low <= bar < cost.high else ""
            print(
                f"{hidden} x {batch_size}, {name}: {1e3 * cost.median:+.1f} us ({1e3 * cost.low:+.1f} to "
                f"{1e3 * cost.high:+.1f}) on a step of {step:.3f} ms ({100 * cost.median / step:+.2f} %){unknown}",
                flush=True,
            )
    return good


def kill(sweeps: int, overrides: list[str]) -> bool:
    """Kills an entrant in each sweep; passes if every report has the other two."""
    ended = 0
    for number in range(1, sweeps + 1):
        with tempfile.TemporaryDirectory() as name:
            process = sweep(Path(name), ["scratch", "amp", "fp32"], [*overrides, "measure.budget_s=5"])
            while process.poll() is None and len(entrants_of(process.pid)) < 3:
                time.sleep(0.05)
            after = random.uniform(0, 14)
            time.sleep(after)
            entrants = entrants_of(process.pid)
            if entrants:
                os.kill(random.choice(entrants), signal.SIGKILL)
            process.communicate()
            summary = Path(name) / "sweep" / "report" / "summary.csv"
            table = pd.read_csv(summary) if summary.exists() else pd.DataFrame({"status": []})
            ended += len(table) == 3 and (table["status"] == "ok").sum() >= 2
            status = ", ".join(table["status"])
            print(
                f"{number:3}  after {after:4.1f} s, {'killed one' if entrants else 'all had ended'}: {status}",
                flush=True,
            )
    print(f"{ended} of {sweeps} sweeps ended with a report in which the others finished")
    return ended == sweeps


def entrants_of(launcher: int) -> list[int]:
    """Returns the processes of a sweep's entrants: children of the launcher, and of the server that forks them."""
    found = []
    for child in children(launcher):
        command = Path(f"/proc/{child}/cmdline")
        said = command.read_text(errors="replace") if command.exists() else ""
        if "multiprocessing.forkserver" in said:
            found += children(child)
        elif "resource_tracker" not in said and "warden" not in said:
            found.append(child)
    return found


def children(pid: int) -> list[int]:
    """Returns the children of all threads of a process; none if the process is gone."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def main() -> None:
    checks = {"same": same, "planted": planted, "overhead": overhead, "kill": kill}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=checks)
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    usual = (
        ["data=digits"]
        if args.check == "planted"
        else ["data=digits", "task.batch_size=512", "task.model.hidden=[1024]"]
    )
    sys.exit(0 if checks[args.check](args.sweeps, args.overrides or usual) else 1)


if __name__ == "__main__":
    main()
