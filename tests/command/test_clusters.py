"""Engines that run races: SLURM, submitit on one machine, arrays; and what they say where they cannot.

SLURM is a true one, of one node. Where it cannot be started its tests are skipped, and say why.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
from support.command import SMALL
from support.slurm import NoSlurm, slurm

from mpcompare.command import submitted

SWEEP = (*SMALL, "verdict.enabled=false", "report.formats=[]", "backend=amp,fp32")
SIX = (*SWEEP, "seed=0,1,2,3,4,5")


def results(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))}


@pytest.fixture(scope="module")
def conf():
    """Starts SLURM; returns the path of its configuration."""
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is not installed")
    try:
        with slurm() as conf:
            yield conf
    except NoSlurm as why:
        pytest.skip(f"no SLURM: {why}")


@pytest.fixture
def in_slurm(conf, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(conf))


def is_complete(folder, races):
    """Returns whether the table has two runs of each race, in turns, and nothing is left running."""
    table = pd.read_csv(folder / "report" / "summary.csv")
    took_turns = {result["timing"]["race"] for result in results(folder).values()}
    marked = [process for process in psutil.process_iter() if str(folder) in " ".join(_command(process))]
    return (len(table), set(table["status"]), len(took_turns), marked) == (2 * races, {"ok"}, races, [])


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_an_engine_that_is_missing_is_one_line_before_anything_is_planned(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    cases = {
        "slurm": "there is no sbatch on this machine",
        "slurn": "expected one of slurm, local (did you mean slurm?)",
    }
    if importlib.util.find_spec("submitit") is None:
        cases = {"slurm": "submitit is not installed: pip install 'mpcompare[slurm]'"}
    for executor, message in cases.items():
        ended = cli("-m", *SWEEP, "hydra/launcher=slurm", f"hydra.launcher.executor={executor}", "hydra.sweep.dir=s")
        assert ended.code == 2
        (line,) = [line for line in ended.err.splitlines() if line.startswith("mpcompare: error: ")]
        assert message in line
    assert not list(tmp_path.rglob("result.json"))
    assert not list(tmp_path.rglob("races"))


def test_without_submitit_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(submitted.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(submitted.InputError, match=r"submitit is not installed: pip install 'mpcompare\[slurm\]'"):
        submitted.Submitted("local", 1, {})


@pytest.mark.parametrize("fault", [FileNotFoundError, subprocess.CalledProcessError(1, "squeue"),
                                   subprocess.TimeoutExpired("squeue", 30)])  # fmt: skip
def test_slurm_that_does_not_answer_ends_no_job(monkeypatch, fault):
    asked = []

    def run(command, **how):
        asked.append(how["timeout"])
        raise fault

    monkeypatch.setattr(submitted.subprocess, "run", run)
    assert submitted._unknown([SimpleNamespace(job_id="7_0")]) == []
    assert submitted._state("7_0") == "SLURM says no more of it"
    assert asked == [submitted.ANSWER_S] * 2


@pytest.mark.slow
def test_a_controller_that_cannot_be_reached_is_one_line(cli, tmp_path, monkeypatch):
    if importlib.util.find_spec("submitit") is None or not shutil.which("sinfo"):
        pytest.skip("submitit or SLURM is not installed")
    conf = "ClusterName=test\nSlurmctldHost=localhost\nSlurmctldPort=1\nNodeName=localhost\nPartitionName=a Nodes=ALL\n"
    (tmp_path / "slurm.conf").write_text(conf)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    ended = cli("-m", *SWEEP, "hydra/launcher=slurm", "hydra.sweep.dir=s")
    assert ended.code == 2
    assert re.fullmatch(r"mpcompare: error: hydra/launcher=slurm: SLURM cannot be reached \(.+\)\n", ended.err)
    assert not list(tmp_path.rglob("result.json"))


@pytest.mark.slow
def test_parameters_that_submitit_does_not_take_are_one_line(cli, tmp_path):
    pytest.importorskip("submitit")
    ended = cli("-m", *SWEEP, "hydra/launcher=slurm", "hydra.launcher.executor=local",
                "+hydra.launcher.parameters.minutes=3", "hydra.sweep.dir=s")  # fmt: skip
    assert ended.code == 2
    (line,) = [line for line in ended.err.splitlines() if line.startswith("mpcompare: error: ")]
    assert "minutes" in line
    assert {result["status"] for result in results(tmp_path / "s").values()} == {"planned"}


@pytest.mark.slow
def test_six_races_on_one_machine_with_submitit(cli, tmp_path):
    pytest.importorskip("submitit")
    ended = cli("-m", *SIX, "hydra/launcher=slurm", "hydra.launcher.executor=local", "hydra.sweep.dir=s")
    assert ended.code == 0, ended.err
    assert is_complete(tmp_path / "s", races=6)


@pytest.mark.slow
def test_six_races_as_jobs_of_slurm(cli, tmp_path, in_slurm):
    ended = cli("-m", *SIX, "hydra/launcher=slurm", "hydra.sweep.dir=s")
    assert ended.code == 0, ended.err
    assert ended.out.count("job ") >= 6
    assert is_complete(tmp_path / "s", races=6)


@pytest.mark.slow
def test_the_array_of_a_plan_runs_in_slurm(cli, tmp_path, in_slurm):
    assert cli("plan", *SWEEP, "seed=0,1", "hydra.sweep.dir=s", "--array", "array.sh").code == 0
    subprocess.run(["sbatch", "--wait", "array.sh"], cwd=tmp_path, check=True, timeout=500)
    assert cli("report", "s").code == 0
    assert is_complete(tmp_path / "s", races=2)


class Driver:
    """The driver of a sweep of two races in SLURM. The first race trains for ``steps`` steps."""

    def __init__(self, folder, steps, *more):
        """Starts it."""
        self.folder = folder / "s"
        command = ["-m", "mpcompare", "-m", *SWEEP, f"train.steps={steps},4", "train.checkpoint_every=500", *more]
        command += ["hydra/launcher=slurm", "hydra.sweep.dir=s"]
        self.process = subprocess.Popen([sys.executable, *command], cwd=folder, stderr=subprocess.PIPE, text=True)

    def wait_for_a_checkpoint(self):
        """Waits until the first race has a checkpoint; returns the number of its job."""
        while not list(self.folder.glob("0-amp-auto/checkpoints/step-*")):
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)
        (number,) = _said("squeue", "--noheader", "--states=R", "--format=%i").split()
        return number

    def end(self):
        """Waits for its end; returns its exit code, and the table of its report."""
        self.process.communicate(timeout=500)
        return self.process.returncode, pd.read_csv(self.folder / "report" / "summary.csv").set_index("run")

    def complete(self):
        """Runs what is missing."""
        files = sorted(map(str, self.folder.glob("races/*.json")))
        subprocess.run([sys.executable, "-m", "mpcompare", "run", "--resume", *files], check=True)
        assert {result["status"] for result in results(self.folder).values()} == {"ok"}


def _first_race_ended(driver, said):
    """Checks that the first race ended without its end, with this in its rows, and that the other one ran."""
    code, table = driver.end()
    assert code == 1
    assert set(table.loc[SHORT, "status"]) == {"ok"}
    assert table.loc[LONG, "error"].str.contains(said, regex=False).all()
    return table


def _said(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


LONG, SHORT = ["0-amp-auto", "1-fp32-auto"], ["2-amp-auto", "3-fp32-auto"]


@pytest.mark.slow
def test_a_job_that_is_killed_is_a_row_and_resume_runs_it(tmp_path, in_slurm):
    driver = Driver(tmp_path, 6000)
    driver.wait_for_a_checkpoint()
    commands = {each: _command(each) for each in psutil.process_iter()}
    ours = {each: command for each, command in commands.items() if str(driver.folder) in " ".join(command)}
    (worker,) = [each for each, command in ours.items() if "submitit.core._submit" in command and "srun" not in command]
    for process in [*worker.children(recursive=True), worker]:
        process.kill()
    _first_race_ended(driver, "of slurm ended (")
    driver.complete()


@pytest.mark.slow
def test_a_job_that_is_cancelled_is_a_row_and_the_other_race_runs(tmp_path, in_slurm):
    driver = Driver(tmp_path, 6000)
    _said("scancel", driver.wait_for_a_checkpoint())
    table = _first_race_ended(driver, "of slurm ended (CANCELLED")
    assert set(table.loc[LONG, "status"]) == {"interrupted"}
    driver.complete()


@pytest.mark.slow
def test_a_job_that_is_preempted_goes_on_when_it_is_its_turn_again(tmp_path, in_slurm):
    driver = Driver(tmp_path, 6000)
    _said("scontrol", "requeue", driver.wait_for_a_checkpoint())
    code, table = driver.end()
    assert code == 0
    assert set(table["status"]) == {"ok"}
    assert results(driver.folder)["0-amp-auto"]["went_on"]["path"] == str(driver.folder / "0-amp-auto")


@pytest.mark.slow
@pytest.mark.parametrize("warned_s", [1, 0])
def test_a_time_limit_is_a_row_and_the_other_race_runs(tmp_path, in_slurm, warned_s):
    """SLURM warns a job, which submitit hears, or only ends it."""
    limits = ("hydra.launcher.parameters.timeout_min=1", f"hydra.launcher.parameters.slurm_signal_delay_s={warned_s}")
    driver = Driver(tmp_path, 10**7, *limits)
    table = _first_race_ended(driver, "timed-out" if warned_s else "(TIMEOUT")
    assert set(table.loc[LONG, "status"]) == {"interrupted"}


@pytest.mark.slow
def test_machines_of_two_kinds_never_meet_in_one_ratio(cli, tmp_path, monkeypatch):
    assert cli("plan", *SWEEP, "seed=0,1", "hydra.sweep.dir=s").code == 0
    for number, threads in enumerate(("1", "2")):
        command = [sys.executable, "-m", "mpcompare", "run", f"s/races/00{number}.json"]
        environment = {**subprocess.os.environ, "OMP_NUM_THREADS": threads}
        subprocess.run(command, cwd=tmp_path, check=True, env=environment)
    ended = cli("report", "s")
    assert ended.code == 0, ended.err
    table = pd.read_csv(tmp_path / "s" / "report" / "summary.csv").set_index("run")
    assert table["threads"].to_dict() == {"0-amp-auto": 1, "1-amp-auto": 2, "2-fp32-auto": 1, "3-fp32-auto": 2}
    assert (table["threads"] == table["baseline"].map(table["threads"])).all()
    titles = [line for line in ended.out.splitlines() if line.startswith("mnist_mlp, batch 64")]
    assert [title.rpartition(", ")[2] for title in titles] == ["1 threads", "2 threads"]
