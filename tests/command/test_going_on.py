"""A sweep that was killed goes on: docs/resume.md."""

import json
import shutil

import pandas as pd
import pytest
from support.command import SMALL

from mpcompare.command.going_on import how_to_go_on
from mpcompare.errors import InputError
from mpcompare.records import check_unused

SWEEP = ("-m", *SMALL, "backend=amp,fp32", "verdict.noise=1", "train.checkpoint_every=2")


def results(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))}


@pytest.fixture
def swept(cli, tmp_path):
    """Returns the folder of a sweep of two races, all finished."""
    assert cli(*SWEEP, "seed=0,1", "hydra.sweep.dir=swept").code == 0
    return tmp_path / "swept"


def test_a_run_with_a_checkpoint_says_how_it_goes_on(tmp_path):
    (run := tmp_path / "0-amp").mkdir()
    (run / "result.json").write_text("{}")
    assert how_to_go_on(tmp_path) == ""
    with pytest.raises(InputError, match="nothing is overwritten: name another folder$"):
        check_unused("hydra.run.dir", run)
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    assert how_to_go_on(tmp_path) == f"the same command with resume={tmp_path} goes on"
    with pytest.raises(InputError, match=f"name another folder; resume={run} goes on with it there$"):
        check_unused("hydra.run.dir", run)


@pytest.mark.slow
def test_finished_races_are_taken_whole_and_others_are_timed_anew(cli, swept, tmp_path):
    before = results(swept)
    command = [each for each in SWEEP if "checkpoint_every" not in each]  # checkpoints change no number
    ended = cli(*command, "seed=0,1", "resume=swept", "hydra.sweep.dir=again")
    assert ended.code == 0, ended.err
    assert "Importing torch" not in ended.out
    after = results(tmp_path / "again")
    assert after.keys() == before.keys()
    for name, result in after.items():
        on = {key: before[name][key] for key in ("device_name", "host", "threads")}
        assert result["went_on"] == {"path": f"swept/{name}", "step": None, "on": on}
        assert result["timing"] == before[name]["timing"]
    tables = [pd.read_csv(folder / "report" / "summary.csv") for folder in (swept, tmp_path / "again")]
    pd.testing.assert_frame_equal(*(table.drop(columns=["folder", "run"], errors="ignore") for table in tables))

    # The processes of the second race died while the last entrant was timed, so all that was timed there is void.
    name = "3-fp32-auto"
    (swept / name / "result.json").write_text(json.dumps({**before[name], "status": "running"}))
    ended = cli(*SWEEP, "seed=0,1", "resume=swept", "hydra.sweep.dir=third")
    assert ended.code == 0, ended.err
    after = results(tmp_path / "third")
    races = {name: result["timing"]["race"] for name, result in after.items()}
    assert races["0-amp-auto"] == races["2-fp32-auto"] == before["0-amp-auto"]["timing"]["race"]
    assert races["1-amp-auto"] == races["3-fp32-auto"] != before["1-amp-auto"]["timing"]["race"]
    assert f"{name}: taken as it is from swept/{name}" in ended.err
    assert "fp32: taken as it is from swept/3-fp32-auto" in ended.out
    for name in before:
        for file in ("steps.csv", "evals.csv", "numerics.json"):
            assert (tmp_path / "third" / name / file).read_bytes() == (swept / name / file).read_bytes()
    assert pd.read_csv(tmp_path / "third" / "report" / "summary.csv")["side_by_side"].all()


@pytest.mark.slow
def test_another_sweep_is_one_line_before_anything_begins(cli, swept, tmp_path):
    wrong = {
        "task.batch_size=32": "no job of this sweep goes on with 0-amp-auto, which has task.batch_size=64 and not 32",
        "train.steps=8": "which has train.steps=4 and not 8",
    }
    for number, (override, message) in enumerate(wrong.items()):
        command = [each for each in SWEEP if each.split("=")[0] != override.split("=")[0]]
        ended = cli(*command, "seed=0,1", override, "resume=swept", f"hydra.sweep.dir=wrong{number}")
        assert ended.code == 2
        (line,) = [line for line in ended.err.splitlines() if line.startswith("mpcompare: error: resume=swept: ")]
        assert message in line
        assert not list((tmp_path / f"wrong{number}").rglob("result.json"))
    ended = cli(*SMALL, "backend=amp", "resume=swept", "hydra.run.dir=one")
    assert ended.code == 2
    assert "resume=swept: is the folder of a sweep: name one of its runs, or all by -m" in ended.err
    file = swept / "0-amp-auto" / "result.json"
    file.write_text(file.read_text().replace('"format_version": 3', '"format_version": 1'))
    ended = cli(*SWEEP, "seed=0,1", "resume=swept", "hydra.sweep.dir=other")
    assert ended.code == 2
    assert "format_version=1: expected 3: another version of mpcompare has written swept/0-amp-auto/" in ended.err
    shutil.rmtree(swept / "0-amp-auto" / "checkpoints")
    (swept / "0-amp-auto" / "result.json").write_text("[1")
    ended = cli(*SWEEP, "seed=0,1", "resume=swept", "hydra.sweep.dir=damaged")
    assert ended.code == 2
    assert "resume=swept: a record there cannot be read" in ended.err
