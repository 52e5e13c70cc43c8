"""A race is a file: planned here, run anywhere, in a report again (docs/clusters.md)."""

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pandas as pd
import pytest
from support.command import SMALL

from mpcompare.command import launcher, race_file
from mpcompare.command.folders import locked
from mpcompare.command.going_on import ready
from mpcompare.command.sweep import Job
from mpcompare.errors import InputError
from mpcompare.race.timetable import RaceStage

# Fields that a clock or a meter has read, that are drawn at random with each block, or that name the folder.
MEASURED = (
    *("*_ms", "*_ms_p?0", "*_s", "*_per_s", "seconds", "batches", "timing", "timed_*", "phase_*", "tflops", "*rss*"),
    *("examine_*_bytes", "sweep"),
)
SWEEP = (*SMALL, "backend=amp,fp32", "seed=0,1", "train.deterministic=true", "verdict.noise=1", "report.formats=[]")


def results(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))}


def statuses(folder):
    return {name: result["status"] for name, result in results(folder).items()}


@pytest.fixture
def planned(cli, tmp_path):
    """Returns the folder of a sweep of two races that is planned, and not run."""
    ended = cli("plan", *SWEEP, "hydra.sweep.dir=planned")
    assert ended.code == 0, ended.err
    return tmp_path / "planned"


def test_a_plan_is_a_file_a_race_and_a_row_a_run(cli, planned):
    files = sorted((planned / "races").iterdir())
    assert [file.name for file in files] == ["000.json", "001.json"]
    race = json.loads(files[1].read_text())
    assert [entrant["name"] for entrant in race["entrants"]] == ["1-amp-auto", "3-fp32-auto"]
    assert {entrant["record"]["config"]["seed"] for entrant in race["entrants"]} == {1}
    assert race["entrants"][0]["record"]["config"]["report"]["baseline"] == "amp"
    assert set(race["code"]) == {"torch", "mpcompare"}
    assert "${" not in json.dumps([entrant["record"] for entrant in race["entrants"]])  # it is whole
    assert set(statuses(planned).values()) == {"planned"}
    ended = cli("report", "planned")
    assert ended.code == 1
    table = pd.read_csv(planned / "report" / "summary.csv")
    assert table["error"].tolist() == ["planned, and not run yet"] * 4
    ended = cli("plan", *SWEEP, "hydra.sweep.dir=planned")
    assert ended.code == 2
    assert "already holds a run" in ended.err


@pytest.mark.slow
def test_a_race_file_that_is_not_as_it_was_planned_is_one_line(cli, planned):
    file = planned / "races" / "001.json"
    whole = json.loads(file.read_text())
    for text, message in (
        (json.dumps({**whole, "format_version": 2}), "has format_version=2, expected 1: another version of mpcompare"),
        (json.dumps({**whole, "device": "cuda"}), "was edited since it was planned"),
        ("{", "cannot be read"),
    ):
        file.write_text(text)
        ended = cli("run", "planned/races/000.json", "planned/races/001.json")
        assert ended.code == 2
        (line,) = ended.err.splitlines()
        assert line.startswith("mpcompare: error: race=planned/races/001.json: ")
        assert message in line
        assert set(statuses(planned).values()) == {"planned"}


@pytest.mark.parametrize("is_there", [False, True], ids=["no such file", "a folder"])
def test_a_race_file_that_cannot_be_read_is_one_line(cli, tmp_path, is_there):
    if is_there:
        (tmp_path / "race.json").mkdir()
    ended = cli("run", "race.json")
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith("mpcompare: error: race=race.json: cannot be read (")
    assert line.endswith("expected a file that mpcompare plan wrote")


@pytest.fixture
def job(tmp_path):
    """Returns a job of the sweep ``tmp_path``."""
    return Job(tmp_path, "0-amp", {"backend": "amp", "config": {"device": "cpu", "task": {}}}, {})


def test_a_race_file_is_read_in_a_folder_races_alone(job, tmp_path):
    """Its runs are written into the folder above, which could be any other."""
    written = race_file.write([job])
    assert [each.folder for each in race_file.read(written)] == [tmp_path / "0-amp"]
    (elsewhere := tmp_path / "downloads").mkdir()
    with pytest.raises(InputError, match="000.json: expected it in a folder races: its runs are written into the"):
        race_file.read(Path(shutil.copy(written, elsewhere)))


def test_a_race_file_that_was_copied_alone_has_folders_for_its_runs(job, tmp_path):
    ready([job])
    assert job.folder.is_dir()
    (tmp_path / "1-fp32").write_text("no folder")
    with pytest.raises(InputError, match="race=.*1-fp32: cannot write there \\("):
        ready([replace(job, name="1-fp32")])


def test_the_configuration_of_a_job_makes_no_folder(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = replace(job, hydra={"sweep": {"dir": "${free:multirun/second}", "subdir": "${hydra.job.num}"}})
    assert dict(asked.config.hydra.sweep) == {"dir": str(tmp_path), "subdir": "0-amp"}
    assert list(tmp_path.iterdir()) == []


def test_a_race_does_not_end_the_entrant_of_the_same_name_in_another_sweep(job, tmp_path, monkeypatch):
    """The stages of both stand in one timetable, which says how long all races still take."""
    first = replace(job, hydra={"job": {"env_set": {}}, "overrides": {"task": []}})
    other = replace(first, sweep=tmp_path / "other")
    races, left = {}, []
    for each in (first, other):
        each.sweep.mkdir(exist_ok=True)
        races[race_file.write([each])] = [each]

    def end(jobs, hydra, processes, board, own):
        board.end_turn("0-amp", gone=True)
        left.append([board.timetable.marks(each.folder)[0][1] for each in (first, other)])

    for name, double in {"stages_of": lambda *_: [RaceStage("training")], "_race": end, "belongings": nullcontext,
                         "fork_server": nullcontext}.items():  # fmt: skip
        monkeypatch.setattr(launcher, name, double)
    launcher.run_races(races, hydra=None)
    assert left == [["out", "ahead"], ["out", "out"]]


@pytest.mark.slow
def test_a_race_file_that_cannot_be_written_is_one_line(cli, tmp_path):
    (tmp_path / "planned").mkdir()
    (tmp_path / "planned" / "races").write_text("no folder")
    ended = cli("plan", *SWEEP, "hydra.sweep.dir=planned")
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith("mpcompare: error: hydra.sweep.dir=")
    assert "cannot write into its races (" in line


@pytest.mark.slow
def test_planned_runs_with_wrong_input_end_as_a_sweep_of_them(cli):
    wrong = [*SMALL[1:3], *SMALL[4:], "data=synthetic", "data.samples=640", "backend=amp,fp32", "report.formats=[]",
             "task.batch_size=641"]  # fmt: skip
    swept = cli("-m", *wrong, "hydra/launcher=basic", "hydra.sweep.dir=swept")
    assert swept.code == 2
    assert cli("plan", *wrong, "hydra.sweep.dir=planned").code == 0
    ended = cli("run", "planned/races/000.json")
    assert ended.code == 2
    line = next(line for line in swept.err.splitlines() if line.startswith("mpcompare: error: task.batch_size"))
    assert line in ended.err.splitlines()


@pytest.mark.slow
def test_other_code_is_one_line_that_names_it(cli, planned, monkeypatch):
    real = race_file.version
    monkeypatch.setattr(race_file, "version", lambda name: "9.9" if name == "torch" else real(name))
    ended = cli("run", "planned/races/000.json")
    assert ended.code == 2
    assert "was planned with torch " in ended.err
    assert "and here is 9.9" in ended.err


def test_the_sources_of_a_users_module_are_part_of_the_code(tmp_path, monkeypatch):
    (tmp_path / "my_net_of_36.py").write_text("class Net: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"task": {"model": {"_target_": "my_net_of_36.Net"}}}
    before = race_file.fingerprints(config)
    assert set(before) == {"torch", "mpcompare", "my_net_of_36"}
    (tmp_path / "my_net_of_36.py").write_text("class Net: pass\n")
    assert {name for name, now in race_file.fingerprints(config).items() if now != before[name]} == {"my_net_of_36"}


def test_a_source_that_cannot_be_read_is_one_line_and_a_lock_of_an_editor_is_no_source(tmp_path, monkeypatch):
    package = tmp_path / "my_net_of_37"
    package.mkdir()
    (package / "__init__.py").write_text("class Net: ...\n")
    (package / ".#__init__.py").symlink_to("user@host.1234")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"task": {"model": {"_target_": "my_net_of_37.Net"}}}
    assert "my_net_of_37" in race_file.fingerprints(config)
    real = Path.read_bytes

    def read_bytes(path):
        if path.parent == package:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(InputError, match=r"code=.*__init__\.py: cannot be read \(Permission denied\): expected"):
        race_file.fingerprints(config)


def test_the_array_of_a_plan_is_a_script_that_bash_reads(cli, tmp_path):
    ended = cli("plan", *SWEEP, 'hydra.sweep.dir="it\'s planned"', "--array", "an array.sh")
    assert ended.code == 0, ended.err
    said = [shlex.split(line.partition("[HYDRA] ")[2]) for line in ended.out.splitlines()[-2:]]
    assert said[0][:2] == ["sbatch", "an array.sh"]
    assert said[1][3] == "it's planned/races/*.json"
    assert said[1][-4:-1] == ["it's planned", "draws", "the"]
    script = tmp_path / "an array.sh"
    assert "#SBATCH --array=0-1\n" in script.read_text()
    stand_in = script.read_text().replace(f"exec {sys.executable}", "printf '%s\\n'")
    ended = subprocess.run(
        ["bash", "-c", stand_in], env={**os.environ, "SLURM_ARRAY_TASK_ID": "1"}, capture_output=True, text=True
    )
    assert ended.stdout.splitlines()[-1] == f"{tmp_path}/it's planned/races/001.json", ended.stderr


def test_a_race_that_another_process_runs_is_waited_for(tmp_path):
    file = tmp_path / "000.json"
    file.write_text("{}")
    script = (
        "import sys; from pathlib import Path; from mpcompare.command.folders import locked\n"
        "with locked(Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "in\n"
    waiter = subprocess.Popen([sys.executable, "-c", script, file], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        waiter.wait(1)
    holder.kill()
    assert waiter.wait(20) == 0
    holder.wait()
    with locked(file, shared=True), locked(file, shared=True):
        pass


def comparable(value):
    """Returns a record without ``MEASURED`` fields."""
    if not isinstance(value, dict):
        return value
    return {key: comparable(each) for key, each in value.items() if not any(fnmatch(key, name) for name in MEASURED)}


@pytest.mark.slow
def test_plan_run_and_report_are_the_sweep(cli, planned, tmp_path):
    assert cli("run", *map(str, sorted((planned / "races").iterdir()))).code == 0
    assert cli("report", "planned").code == 0
    ended = cli("-m", *SWEEP, "hydra.sweep.dir=swept")
    assert ended.code == 0, ended.err
    one, other = results(planned), results(tmp_path / "swept")
    assert list(one) == list(other)
    for name in one:
        assert list(one[name]) == list(other[name])  # the same fields in the same order
        assert comparable(one[name]) == comparable(other[name])
        steps = [pd.read_csv(folder / name / "steps.csv") for folder in (planned, tmp_path / "swept")]
        pd.testing.assert_frame_equal(*(each.drop(columns="step_ms") for each in steps))
        numerics = [(folder / name / "numerics.json").read_bytes() for folder in (planned, tmp_path / "swept")]
        assert numerics[0] == numerics[1]
    races = [{name: result["timing"]["race"] for name, result in each.items()} for each in (one, other)]
    for race in races:
        assert race["0-amp-auto"] == race["2-fp32-auto"] != race["1-amp-auto"] == race["3-fp32-auto"]
    drawn = (planned / "report", tmp_path / "swept" / "report")
    verdicts = [json.loads((folder / "verdict.json").read_text()) for folder in drawn]
    words = [{name: verdict["word"] for name, verdict in each.items()} for each in verdicts]
    assert words[0] == words[1]


@pytest.mark.slow
def test_resume_runs_what_is_missing_and_keeps_what_was_written(cli, tmp_path):
    assert cli("plan", *SWEEP, "train.checkpoint_every=2", "hydra.sweep.dir=planned").code == 0
    planned, files = tmp_path / "planned", ["planned/races/000.json", "planned/races/001.json"]
    assert cli("run", files[0]).code == 0
    before = results(planned)
    ended = cli("run", *files)
    assert ended.code == 2
    assert "already holds a run (result.json); --resume runs what is missing" in ended.err
    # One run of the first race was killed while it was timed, one of the second before its first checkpoint.
    late, early = planned / "2-fp32-auto", planned / "3-fp32-auto"
    (late / "result.json").write_text(json.dumps({**before["2-fp32-auto"], "status": "running"}))
    shutil.copy(late / "steps.csv", early / "steps.csv")
    (early / "result.json").write_text(json.dumps({**results(planned)["3-fp32-auto"], "status": "running"}))
    ended = cli("run", "--resume", *files)
    assert ended.code == 0, ended.err
    after = results(planned)
    assert set(statuses(planned).values()) == {"ok"}
    assert after["2-fp32-auto"]["went_on"]["path"] == str(late)
    assert after["2-fp32-auto"]["timing"]["race"] == after["0-amp-auto"]["timing"]["race"]
    assert after["0-amp-auto"]["timing"]["race"] != before["0-amp-auto"]["timing"]["race"]
    assert json.loads((early / "result.json.1").read_text())["status"] == "running"
    assert (early / "steps.csv.1").read_bytes() == (late / "steps.csv").read_bytes()
    ended = cli("run", "--resume", *files)
    assert (ended.code, "Importing torch" in ended.out) == (0, False)
    assert results(planned) == after


@pytest.mark.slow
def test_a_race_that_is_ended_says_so_and_leaves_the_others(planned, tmp_path):
    command = [sys.executable, "-m", "mpcompare", "run", "--resume", "planned/races/000.json", "planned/races/001.json"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (planned / "1-amp-auto" / "steps.csv").exists():
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert set(statuses(planned).values()) <= {"ok", "interrupted"}
    assert statuses(planned)["0-amp-auto"] == "ok"
    assert statuses(planned)["3-fp32-auto"] == "interrupted"
