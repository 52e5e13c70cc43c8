import csv
import json
import math

import pytest

from mpcompare.errors import InputError
from mpcompare.records import Recorder, find_runs, read_run, write_atomically


def row(step, loss=1.0):
    return {"step": step, "warmup": step < 2, "loss": loss, "loss_scale": 65536.0, "skipped": False, "step_ms": 0.5}


def test_what_is_written_is_read_back(tmp_path):
    recorder = Recorder(tmp_path, {"backend": "x"})
    recorder.steps([row(1)])
    recorder.steps([row(2, math.inf), row(3, math.nan)])
    recorder.add(status="ok", final_loss=math.nan, nested={"peak": [1, math.inf]})
    run = read_run(tmp_path)
    assert list(run.steps) == ["step", "warmup", "loss", "loss_scale", "skipped", "step_ms"]
    assert run.steps["step"].tolist() == [1, 2, 3]
    assert run.steps["warmup"].tolist() == [True, False, False]
    assert run.steps["loss"][1] == math.inf
    assert math.isnan(run.steps["loss"][2])
    assert run.result["status"] == "ok"
    assert math.isnan(float(run.result["final_loss"]))
    assert float(run.result["nested"]["peak"][1]) == math.inf


def test_every_step_is_on_disk_before_the_next(tmp_path):
    recorder = Recorder(tmp_path, {})
    for step in range(1, 4):
        recorder.steps([row(step)])
        with (tmp_path / "steps.csv").open() as file:
            assert [int(line["step"]) for line in csv.DictReader(file)] == list(range(1, step + 1))
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "running"  # if it were killed now


def test_a_folder_that_holds_a_run_is_refused_and_untouched(tmp_path):
    Recorder(tmp_path, {"backend": "first"}).steps([row(1)])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(InputError, match=r"hydra.run.dir=.*already holds a run"):
        Recorder(tmp_path, {"backend": "second"})
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        write_atomically(path, 5)  # type: ignore[arg-type]
    assert path.read_text() == "old"


def test_runs_are_found_below_a_sweep_in_job_order(tmp_path):
    for job in (0, 1, 2, 10, 9):
        folder = tmp_path / "sweep" / f"{job}-amp-fp16"
        folder.mkdir(parents=True)
        Recorder(folder, {"job": job})
    assert [run.result["job"] for run in find_runs([tmp_path])] == [0, 1, 2, 9, 10]
    assert len(find_runs([tmp_path, tmp_path / "sweep" / "1-amp-fp16"])) == 5  # each once


@pytest.mark.parametrize("content", ["{", ""])
def test_an_unreadable_run_is_named(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(InputError, match=f"folder={tmp_path}: not a readable run"):
        find_runs([tmp_path])


def test_no_runs_and_no_folder_are_named(tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        find_runs([tmp_path])
    with pytest.raises(InputError, match="no such folder"):
        find_runs([tmp_path / "nothing"])
