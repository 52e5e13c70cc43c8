"""A report whose reader goes away: every file of it is there all the same."""

import os
import signal
import subprocess
import sys

import pytest
from support.marks import slow_after
from support.records import write_run

from mpcompare.streams import lasting

FILES = {"summary.csv", "summary.md", "verdict.json", "index.html"}
REPORT = f"{sys.executable} -m mpcompare.report runs --formats"


@pytest.mark.parametrize(
    "command",
    slow_after(
        1,
        [
            f"set -o pipefail; {REPORT} | true",
            f"{REPORT} >/dev/full 2>/dev/full",
            f"{REPORT} >/dev/full",
            f"{REPORT} >&- 2>&- <&-",
            f"PYTHONIOENCODING=ascii {REPORT} >/dev/null",
        ],
    ),
    ids=["closed pipe", "both full", "full", "closed", "ascii"],
)
def test_a_lost_stream_costs_no_file_and_is_no_error(tmp_path, command):
    write_run(tmp_path / "runs" / "0", "amp")
    ended = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert {path.name for path in (tmp_path / "runs" / "report").iterdir()} == FILES


def test_the_end_of_a_terminal_does_not_end_the_program_nor_stay_ignored():
    before = signal.getsignal(signal.SIGHUP)
    with lasting():
        os.kill(os.getpid(), signal.SIGHUP)
        print("gone on")
    assert signal.getsignal(signal.SIGHUP) is before
