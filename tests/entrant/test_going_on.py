"""A run of a sweep that was killed goes on as if nobody had killed it."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from support.entrants import block, turn
from support.plans import SMALL_PLAN, replan
from support.tasks import make_task

from mpcompare.checkpoints import CHECKPOINTS
from mpcompare.entrant.entrant import compete, find_start
from mpcompare.race.orders import Finish, Train
from mpcompare.records import WENT_ON, RunRecorder

PLAN = replan(
    SMALL_PLAN, task=make_task(in_features=784, out_features=10, momentum=0.9), is_baseline=True,
    train={"steps": 8, "warmup_steps": 2, "checkpoint_every": 3}, eval={"every": 2}, monitor={"every": 4},
    verdict={"enabled": True, "noise": 1},
)  # fmt: skip
FINISH = Finish(1, "budget", 0.1, 1.0, None, 1)


def trained(plan, folder, goes_on=False):
    """Takes a run up to its timing. Returns its turns."""
    turns = compete(plan, RunRecorder(folder, {"config": {}}, goes_on))
    turn(turns, None)
    turn(turns, Train())
    return turns


def finished(turns):
    block(turns, 1, 7)
    with pytest.raises(StopIteration):
        turn(turns, FINISH)


def content(folder):
    """Returns all that a run has recorded up to its timing, without times."""
    steps, evals = (pd.read_csv(folder / name, dtype=str) for name in ("steps.csv", "evals.csv"))
    return (
        steps.drop(columns="step_ms").to_dict("records"), evals.to_dict("records"),
        json.loads((folder / "numerics.json").read_text()),
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the folder of a run that was trained and examined."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    folder.mkdir()
    trained(PLAN, folder).close()
    return folder


def left_after(whole, folder, step, result):
    """Makes the folder of a run that was killed when it had taken ``step`` steps, as the new sweep takes it."""
    folder.mkdir()
    for name in ("steps.csv", "evals.csv"):
        rows = pd.read_csv(whole / name, dtype=str)
        rows[rows["step"].astype(int) <= step].to_csv(folder / name, index=False)
    (folder / "steps.csv").write_text((folder / "steps.csv").read_text() + "1")  # a row that was not finished
    moves = json.loads((whole / "numerics.json").read_text())["moves"]
    (folder / "moves.json").write_text(json.dumps(moves))  # more steps than any checkpoint has
    shutil.copytree(whole / CHECKPOINTS, folder / CHECKPOINTS)
    for saved in (folder / CHECKPOINTS).iterdir():
        if int(saved.name[5:]) > step:
            shutil.rmtree(saved)
    (folder / "result.json").write_text(json.dumps({**result, WENT_ON: {"path": "killed/0", "step": None, "on": {}}}))
    return replan(PLAN, resume={"folder": folder, "goes_on": True})


@pytest.mark.slow
def test_every_number_is_as_if_nobody_had_killed_it(whole, tmp_path):
    """Steps 9 and 10 have checkpoints. The run was killed in between, or before its examination was done."""
    for step in (9, 10):
        folder = tmp_path / str(step)
        trained(left_after(whole, folder, step, {}), folder, goes_on=True).close()
        assert content(folder) == content(whole)
        result = json.loads((folder / "result.json").read_text())
        assert result["went_on"] == {"path": "killed/0", "step": 9, "on": {}}
        assert "resumed_from" not in result
        assert not (folder / "moves.json").exists()


@pytest.mark.slow
def test_one_that_was_examined_is_taken_as_it_is_and_timed(whole, tmp_path):
    result = json.loads((whole / "result.json").read_text())
    plan = left_after(whole, tmp_path / "taken", 10, result)
    for name in ("steps.csv", "evals.csv", "numerics.json"):
        shutil.copy(whole / name, tmp_path / "taken")
    finished(trained(plan, tmp_path / "taken", goes_on=True))
    for name in ("steps.csv", "evals.csv", "numerics.json"):
        assert (tmp_path / "taken" / name).read_bytes() == (whole / name).read_bytes()
    after = json.loads((tmp_path / "taken" / "result.json").read_text())
    assert (after["status"], after["timing"]["rounds"], after["went_on"]["step"]) == ("ok", 1, None)
    assert after["timed_loss_difference"] == 0
    assert {key: after[key] for key in ("final_loss", "test_loss", "dtypes", "examine_s", "peak_rss_bytes")} == {
        key: result[key] for key in ("final_loss", "test_loss", "dtypes", "examine_s", "peak_rss_bytes")
    }


@pytest.mark.slow
def test_without_a_checkpoint_it_begins_anew(whole, tmp_path):
    plan = left_after(whole, tmp_path / "anew", 5, {})
    assert not list((tmp_path / "anew" / CHECKPOINTS).iterdir())
    trained(plan, tmp_path / "anew", goes_on=True).close()
    assert content(tmp_path / "anew") == content(whole)
    assert json.loads((tmp_path / "anew" / "result.json").read_text())["went_on"] is None


def test_what_begins_anew_goes_on_with_no_run(tmp_path):
    recorder = RunRecorder(tmp_path, {WENT_ON: {"path": "killed/0", "step": None, "on": {}}})
    plan = replan(PLAN, resume={"folder": tmp_path, "goes_on": True})
    entrant = SimpleNamespace(plan=plan, setup=None, checkpoint=None, recorder=recorder)
    assert find_start(entrant) == {WENT_ON: None}


def test_where_steps_are_missing_it_is_a_run_that_resumed(whole, tmp_path):
    plan = left_after(whole, tmp_path / "part", 9, {})
    file = Path(tmp_path / "part" / "steps.csv")
    file.write_text("\n".join(line for line in file.read_text().splitlines() if not line.startswith("5,")) + "\n")
    trained(plan, tmp_path / "part", goes_on=True).close()
    assert pd.read_csv(file)["step"].tolist() == [10]
    result = json.loads((tmp_path / "part" / "result.json").read_text())
    assert (result["resumed_from"]["step"], result["resumed_from"]["path"]) == (9, "killed/0")
