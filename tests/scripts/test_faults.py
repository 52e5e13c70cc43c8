"""25 of the faults of scripts/faults.py, and what it calls damage."""

import random

import faults
import pytest
from faults_command import Command, error_line
from faults_kinds import damage


@pytest.mark.slow
def test_faults_cost_nothing(capfd):
    with pytest.raises(SystemExit) as end:
        faults.main(["--faults", "25", "--seed", "1"])
    assert end.value.code == 0, capfd.readouterr().out


def test_damage_changes_a_file_in_each_way(tmp_path):
    seen = set()
    for seed in range(60):
        (file := tmp_path / str(seed)).write_bytes(whole := bytes(range(100)))
        how = damage(file, random.Random(seed)).split()[0]
        assert not file.is_file() or file.read_bytes() != whole
        seen.add(how)
    assert seen == {"flip", "cut", "empty", "grow", "gone", "pipe", "folder"}


def test_one_line_is_one_line():
    line = "mpcompare: error: a=1: no"
    assert error_line(2, f"log\n{line}\n") == line
    for code, said in [(1, line), (2, ""), (2, f"{line}\n{line}"), (2, f"Traceback\n{line}")]:
        with pytest.raises(AssertionError):
            error_line(code, said)


def leave_a_process():
    import subprocess

    subprocess.Popen(["sleep", "3"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_process_that_is_left_is_seen():
    assert Command(main=lambda: None).end() == (0, "")
    with pytest.raises(AssertionError, match="it has left .*sleep 3"):
        Command(main=leave_a_process).end()
