import csv
import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.records import result_of, write_run

from mpcompare import records
from mpcompare.errors import InputError
from mpcompare.fields import TYPES, Result
from mpcompare.records import RunRecorder, write_atomically
from mpcompare.report.runs import find_runs, read_run
from mpcompare.typed import required

AT_START = {**dict.fromkeys(required(Result)), "status": "running", "backend": "amp", "config": {"task": {}}}


def row(step, loss=1.0):
    return {
        "step": step, "warmup": step < 2, "loss": loss, "lr": 0.1, "loss_scale": 65536.0, "skipped": False,
        "grad_norm": None, "clipped": False, "step_ms": 0.5,
    }  # fmt: skip


def test_of_runs_that_begin_in_one_folder_at_one_time_one_has_it(tmp_path):
    def begin(seed):
        try:
            return RunRecorder(tmp_path, {**AT_START, "seed": seed}).result["seed"]
        except InputError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(begin, range(40)))
    (seed,) = (each for each in said if isinstance(each, int))
    assert json.loads((tmp_path / "result.json").read_text())["seed"] == seed
    (line,) = {each for each in said if isinstance(each, str)}
    assert "already holds a run" in line
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_what_is_written_is_read_back(tmp_path):
    recorder = RunRecorder(tmp_path, AT_START)
    recorder.append(records.STEPS, [row(1)])
    recorder.append(records.STEPS, [row(2, math.inf), row(3, math.nan)])
    trained = result_of(final_loss=math.nan).training
    recorder.add(status="failed", nested={"peak": [1, math.inf]}, **vars(trained))
    run = read_run(tmp_path)
    assert list(run.steps) == list(records.COLUMNS[records.STEPS])
    assert run.steps["step"].tolist() == [1, 2, 3]
    assert run.steps["warmup"].tolist() == [True, False, False]
    assert run.steps["loss"][1] == math.inf
    assert math.isnan(run.steps["loss"][2])
    assert run.result.status == "failed"
    assert math.isnan(run.result.training.final_loss)
    assert json.loads((tmp_path / "result.json").read_text())["nested"] == {"peak": [1, "inf"]}


def test_every_step_is_on_disk_before_the_next(tmp_path):
    recorder = RunRecorder(tmp_path, {})
    for step in range(1, 4):
        recorder.append(records.STEPS, [row(step)])
        with (tmp_path / "steps.csv").open() as file:
            assert [int(line["step"]) for line in csv.DictReader(file)] == list(range(1, step + 1))
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "running"  # if it were killed now


def test_the_moves_stay_until_the_result_says_that_the_run_was_examined(tmp_path):
    recorder, moves = RunRecorder(tmp_path, AT_START), tmp_path / records.MOVES
    recorder.moves({"steps": [0.5]})
    recorder.numerics({"moves": {"steps": [0.5]}})
    recorder.add(test_loss=0.5)
    assert moves.exists()  # killed now, the run goes on from its last checkpoint, and examines once more
    recorder.add(module_dtypes={})
    assert not moves.exists()


def test_a_folder_that_holds_a_run_is_refused_and_untouched(tmp_path):
    RunRecorder(tmp_path, {"backend": "first"}).append(records.STEPS, [row(1)])
    for _ in range(2):
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        with pytest.raises(InputError, match=r"already holds a run"):
            RunRecorder(tmp_path, {"backend": "second"})
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
        (tmp_path / "result.json").unlink(missing_ok=True)  # steps.csv alone is a run too


def test_a_write_that_dies_half_way_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "result.json"
    write_atomically(path, lambda file: file.write_text("old"))

    def dies(file):
        file.write_text("ha")
        assert path.read_text() == "old"  # not yet touched
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, dies)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_folder_that_vanishes_is_one_line(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    recorder = RunRecorder(folder, {})
    (folder / "result.json").unlink()
    folder.rmdir()
    for call in (lambda: recorder.append(records.STEPS, [row(1)]), lambda: recorder.add(status="ok")):
        with pytest.raises(InputError, match="cannot write there \\(No such file or directory\\)"):
            call()


def test_a_row_that_was_cut_off_is_no_row(tmp_path):
    recorder = RunRecorder(tmp_path, AT_START)
    recorder.append(records.STEPS, [row(1), row(2)])
    with (tmp_path / "steps.csv").open("a") as file:
        file.write("3,False,0.4018,1.0,False,0.")
    assert read_run(tmp_path).steps["step"].tolist() == [1, 2]


def test_runs_are_found_below_a_sweep_in_job_order(tmp_path):
    for job in (0, 1, 2, 10, 9):
        folder = tmp_path / "sweep" / f"{job}-amp-fp16"
        folder.mkdir(parents=True)
        RunRecorder(folder, {**AT_START, "seed": job})
    assert [run.result.seed for run in find_runs([tmp_path])] == [0, 1, 2, 9, 10]
    assert [run.name for run in find_runs([tmp_path])][-1] == "10-amp-fp16"
    assert len(find_runs([tmp_path, tmp_path / "sweep" / "1-amp-fp16"])) == 5  # each once


OK = json.dumps({**dict.fromkeys(TYPES), "format_version": 3, "status": "ok"})


@pytest.mark.parametrize("content", ["{", "", "[1, 2]", "null", '{"accuracy": 1}', '{"status": "ok"}', OK])
def test_an_unreadable_run_is_named(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(InputError, match=f"folder={tmp_path}: not a readable run"):
        find_runs([tmp_path])


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "step,warmup,loss,loss_scale,skipped,step_ms\n1,x,1,1,False,1\n"])
def test_unreadable_steps_are_named(tmp_path, text):
    RunRecorder(tmp_path, AT_START)
    (tmp_path / "steps.csv").write_text(text)
    with pytest.raises(InputError, match="not a readable run"):
        find_runs([tmp_path])


def test_a_finished_run_without_all_its_steps_is_not_readable(tmp_path):
    folder = tmp_path / "run"
    write_run(folder, "amp", losses=(2.0, 1.5, 1.0), blocks=[0.5, 0.5])
    assert len(read_run(folder).steps) == 3
    lines = (folder / "steps.csv").read_text().splitlines(keepends=True)
    for kept in (lines[:3], [lines[0], *lines[2:]]):
        (folder / "steps.csv").write_text("".join(kept))
        with pytest.raises(InputError, match="steps.csv does not hold the steps 1 to 3"):
            read_run(folder)
    (folder / "steps.csv").write_text("".join(lines))
    (folder / "blocks.csv").unlink()
    with pytest.raises(InputError, match="blocks.csv does not hold the rounds 1 to 2"):
        read_run(folder)


def test_only_what_still_runs_is_concluded(tmp_path):
    at_start = {**AT_START, "backend": "amp"}
    del at_start["status"]
    assert records.conclude(tmp_path / "new", at_start, "killed by SIGKILL")
    assert read_run(tmp_path / "new").result.error == "killed by SIGKILL"
    assert not records.conclude(tmp_path / "new", at_start, "something else")
    (tmp_path / "new2").mkdir()
    RunRecorder(tmp_path / "new2", at_start).add(**vars(result_of(engine="native").set_up))
    assert records.conclude(tmp_path / "new2", at_start, "interrupted")
    result = read_run(tmp_path / "new2").result
    assert (result.status, result.set_up.engine) == ("interrupted", "native")


def test_no_runs_and_no_folder_are_named(tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        find_runs([tmp_path])
    with pytest.raises(InputError, match="no such folder"):
        find_runs([tmp_path / "nothing"])
