"""The tables of speed come from sweeps of the harness."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import check_clock
import docs_numbers
import pandas as pd
import pytest
from support.records import result_of

from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.contents import Report
from mpcompare.report.outputs import console
from mpcompare.report.runs import Run


def kept(folder, baseline):
    """Writes a sweep as docs_figures.sh keeps it: amp, scratch twice as fast, and a failed fused."""
    times = {"amp": 4.0, "scratch": 2.0}
    rows = [{"backend": "fused", "precision": "bf16", "run": "2-fused"}]
    for name, ms in reversed(times.items()):
        ratio = ms / times[baseline]
        row = {
            "backend": name, "precision": "bf16", "run": name, "baseline": baseline, "side_by_side": True,
            "step_ms_p50": ms, "step_ms_p20": ms - 0.5, "step_ms_p80": ms + 0.5, "time_vs_baseline": ratio,
            "time_vs_baseline_low": 0.99 * ratio, "time_vs_baseline_high": 1.01 * ratio,
            "peak_memory_bytes": ms * 1e6, "verdict": "same",
        }  # fmt: skip
        rows.insert(0, row)
    pd.DataFrame(rows).to_csv(folder / f"vs_{baseline}.csv", index=False)


def test_the_table_has_times_and_ratios_to_each_baseline_with_their_intervals(tmp_path):
    (tmp_path / "command.txt").write_text("python -m mpcompare +experiment=speed\n")
    kept(tmp_path, "amp")
    kept(tmp_path, "scratch")
    assert docs_numbers.speed(tmp_path).splitlines() == [
        "`python -m mpcompare +experiment=speed`",
        "",
        "| backend | ms a step | p20 to p80 | time / `amp` | time / `scratch` | peak MB | verdict |",
        "|---|---|---|---|---|---|---|",
        "| `amp` bf16 | 4 | 3.5 to 4.5 | 1 | 2.00 (1.98 to 2.02) | 4 | same |",
        "| `scratch` bf16 | 2 | 1.5 to 2.5 | 0.50 (0.49 to 0.51) | 1 | 2 | same |",
        "| `fused` bf16 |  |  |  |  |  |  |",
    ]


def test_what_the_environment_had_set_is_told(tmp_path, capsys):
    def show(*entries):
        console.write(Report([Comparison("title", "data", entries=list(entries))], "amp"), tmp_path)

    def failed(name, environment):
        result = result_of("failed", error="no", backend=name, environment=environment)
        return Entry(Run(Path(name), name, result, pd.DataFrame(), pd.DataFrame()), name, "", None)

    tuned = {"MALLOC_TRIM_THRESHOLD_": "8", "CUDA_VERSION": "13.0", "KMP_INIT_AT_FORK": "FALSE", "OMP_NUM_THREADS": "2"}
    show(failed("amp", tuned), failed("fp32", tuned))
    assert "environment: MALLOC_TRIM_THRESHOLD_=8 OMP_NUM_THREADS=2\n" in capsys.readouterr().out
    show(failed("amp", tuned), failed("fp32", {}))
    said = capsys.readouterr().out
    assert "amp: environment: MALLOC_TRIM_THRESHOLD_=8 OMP_NUM_THREADS=2\nfp32: environment: nothing set\n" in said
    show(failed("amp", {}))
    assert "environment" not in capsys.readouterr().out


SWEEP = """
import multiprocessing, sys, time
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    for _ in range(2):
        context.Process(target=time.sleep, args=(60,), daemon=True).start()
    time.sleep(60)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_processes_of_entrants_are_found_however_they_are_started(tmp_path, method):
    (tmp_path / "launcher.py").write_text(SWEEP)
    launcher = subprocess.Popen([sys.executable, str(tmp_path / "launcher.py"), method])
    try:
        deadline = time.monotonic() + 60
        while len(found := check_clock.entrants_of(launcher.pid)) != 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        assert check_clock.entrants_of(launcher.pid) == found
        assert len(found) == 2
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in found]
        assert all("resource_tracker" not in command for command in commands)
    finally:
        for pid in check_clock.entrants_of(launcher.pid):
            os.kill(pid, signal.SIGKILL)
        launcher.kill()
        launcher.wait()
