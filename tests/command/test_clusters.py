"""Engines that run races: SLURM, submitit on one machine, arrays; and what they say where they cannot.

SLURM is a true one, of one node. Where it cannot be started its tests are skipped, and say why.
"""

import importlib.util
import json
import subprocess
import sys
import time

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


@pytest.mark.slow
def test_a_job_that_is_killed_is_a_row_and_resume_runs_it(tmp_path, in_slurm):
    command = [sys.executable, "-m", "mpcompare", "-m", *SWEEP, "seed=0,1", "hydra/launcher=slurm", "hydra.sweep.dir=s"]
    driver = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (found := list((tmp_path / "s").glob("*/steps.csv"))):
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.1)
    (worker,) = [each for each in psutil.process_iter() if "submitit.core._submit" in " ".join(_command(each))
                 and "srun" not in _command(each)]  # fmt: skip
    for process in [*worker.children(recursive=True), worker]:
        process.kill()
    driver.communicate(timeout=500)
    assert driver.returncode == 1
    table = pd.read_csv(tmp_path / "s" / "report" / "summary.csv").set_index("run")
    died, other = sorted(table["seed"].unique(), key=lambda seed: seed != table.loc[found[0].parent.name, "seed"])
    assert set(table.loc[table["seed"] == other, "status"]) == {"ok"}
    for error in table.loc[table["seed"] == died, "error"]:
        assert "of slurm ended (" in error
    files = sorted(map(str, (tmp_path / "s" / "races").glob("*.json")))
    subprocess.run([sys.executable, "-m", "mpcompare", "run", "--resume", *files], cwd=tmp_path, check=True)
    assert {result["status"] for result in results(tmp_path / "s").values()} == {"ok"}


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
