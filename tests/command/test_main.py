"""The command line as a user has it: the commands that --help names, the records, and every wrong input."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.backends import BACKENDS, make_backend, take_step
from support.command import SMALL
from support.marks import CUDA, slow_after
from support.tasks import make_task

from mpcompare.cost import allocated_bytes
from mpcompare.paths import CONF
from mpcompare.records import MONITORED
from mpcompare.tasks.data import batches
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.task import params_of

# A sweep in this process, for tests of anything but the launcher: no other process has to start.
BASIC = (*SMALL, "hydra/launcher=basic")

EVERY = ", ".join(sorted(path.stem for path in (CONF / "backend").glob("*.yaml")))
DATA = ", ".join(sorted(path.stem for path in (CONF / "data").glob("*.yaml")))

REQUIRED_RESULTS = {
    "backend", "engine", "precision", "dtypes", "step_ms_p20", "step_ms_p50", "step_ms_p80", "samples_per_s", "tflops",
    "peak_memory_bytes", "peak_memory_bytes_analytic", "final_loss", "test_accuracy", "test_loss", "dataset",
    "dataset_reason", "dataset_fingerprint", "initial_weights", "versions", "device", "device_name", "threads", "flags",
    "commit", "config", "status", "memory_model", "memory_by_op", "memory_reserved_bytes", "graph_pool_bytes",
    "batch_bytes", "workspace_bytes", "rss_before_bytes", "peak_rss_bytes",
}  # fmt: skip


@pytest.mark.parametrize("device_name", ["cpu", CUDA])
def test_a_run_writes_steps_and_result(cli, tmp_path, device_name):
    folder = tmp_path / "run"
    ended = cli(*SMALL, f"hydra.run.dir={folder}", f"device={device_name}")
    assert ended.code == 0, ended.err
    steps = pd.read_csv(folder / "steps.csv")
    assert steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert steps["warmup"].tolist() == [True, False, False, False, False]
    assert (steps["step_ms"] > 0).all()
    assert steps["loss"][0] == pytest.approx(math.log(10), abs=0.3)  # knowing nothing of 10 classes
    result = json.loads((folder / "result.json").read_text())
    assert set(result) >= REQUIRED_RESULTS
    assert result["status"] == "ok"
    assert (result["backend"], result["dataset"], result["device"]) == ("scratch", "digits", device_name)
    assert result["precision"] == ("bf16" if device_name == "cpu" else "fp16")
    assert result["dtypes"]["activations"] == result["precision"]
    assert result["final_loss"] == pd.read_csv(folder / "steps.csv", float_precision="round_trip")["loss"].iloc[-1]
    timed = pd.read_csv(folder / "blocks.csv")["step_ms"]
    assert result["timing"]["rounds"] == len(timed)
    assert result["step_ms_p20"] <= result["step_ms_p50"] == timed.median() <= result["step_ms_p80"]
    assert result["samples_per_s"] == pytest.approx(64 / result["step_ms_p50"] * 1e3)
    assert result["config"]["task"]["model"]["hidden"] == [32]
    assert {p.name for p in folder.iterdir()} == {
        "steps.csv", "evals.csv", "blocks.csv", "numerics.json", "result.json", "mpcompare.log", ".hydra",
    }  # fmt: skip


def test_what_is_written_is_what_happened(cli, tmp_path):
    """The run is repeated by hand: the same batches give the same losses, and the numbers that are made of them."""
    folder = tmp_path / "run"
    assert cli(*SMALL, "backend=fp32", f"hydra.run.dir={folder}", "task.samples=192", "device=cpu").code == 0
    result = json.loads((folder / "result.json").read_text())
    cpu, task = torch.device("cpu"), make_task(
        in_features=784, hidden=[32], out_features=10, batch_size=64, samples=192, lr=0.01
    )  # fmt: skip
    dataset = digits(0, 192)
    backend = make_backend("fp32", task, "fp32", cpu)
    losses = [take_step(backend, *batch).item() for batch in islice(batches(dataset, 64), 5)]
    assert pd.read_csv(folder / "steps.csv")["loss"].tolist() == pytest.approx(losses, rel=1e-6)
    assert len(set(losses)) == 5  # three batches, then the first two again
    assert result["dataset_fingerprint"] == dataset.fingerprint
    assert result["initial_weights"] == fingerprint(params_of(task.new_model(0, cpu)))
    output = backend.model(dataset.x_test)
    assert result["test_loss"] == pytest.approx(task.loss_fn(output, dataset.y_test).item(), rel=1e-5)
    assert result["test_accuracy"] == pytest.approx((output.argmax(1) == dataset.y_test).float().mean().item())
    assert result["flops_per_step"] == 64 * (4 * 784 * 32 + 6 * 32 * 10)
    assert result["tflops"] == pytest.approx(result["flops_per_step"] / result["step_ms_p50"] / 1e9)
    assert result["peak_memory_bytes"] == pytest.approx(result["peak_memory_bytes_analytic"], rel=0.01, abs=4096)
    assert result["peak_memory_bytes_analytic"] == allocated_bytes(result["memory_model"])
    assert result["flags"]["tf32"] is False
    assert (result["loss_scale"], result["final_loss_scale"], result["skipped_steps"]) == ("none", 1.0, 0)


@pytest.mark.slow
def test_the_sweep_of_the_readme_ends_in_a_report(cli, tmp_path):
    folder = tmp_path / "sweep"
    ended = cli("-m", "backend=scratch,amp,fp32", *SMALL, f"hydra.sweep.dir={folder}")
    assert ended.code == 0, ended.err
    table = pd.read_csv(folder / "report" / "summary.csv")
    assert table["backend"].tolist() == ["scratch", "amp", "fp32"]
    assert table["status"].tolist() == ["ok"] * 3
    assert table["engine"].tolist() == ["native", "torch", "torch"]
    assert table["time_vs_baseline"][1] == 1.0
    assert table["max_abs_loss_diff_vs_baseline"][1] == 0.0
    # Same weights, same batches: bf16's unit roundoff is 2^-8, and the losses are about 2.3.
    assert (table["max_abs_loss_diff_vs_baseline"] < 2.3 * 2**-8).all()
    results = [json.loads(p.read_text()) for p in sorted(folder.glob("*/result.json"))]
    for key in ("initial_weights", "dataset_fingerprint"):
        assert len({r[key] for r in results}) == 1
    for name in ("loss", "step_time", "phases", "memory"):
        assert (folder / "report" / f"{name}.png").stat().st_size > 10_000
    assert "time / amp bf16" in ended.out
    assert f"Report: {folder / 'report' / 'index.html'}" == ended.out.splitlines()[-1]
    assert "digits" in ended.out
    said = [line for line in ended.err.splitlines() if " so far" in line or ": torch, digits, " in line]
    assert [line.split(", digits")[0] for line in said] == [
        "1-amp-auto: torch",
        "scratch bf16: same so far (compared with amp bf16)",
        "amp bf16: reference so far",
        "2-fp32-auto: torch",
        "fp32: reference so far",
    ]

    from mpcompare.report.__main__ import main

    again = cli(str(folder), "--out", str(tmp_path / "again"), "--baseline", "fp32", main=main)
    assert again.code == 0
    assert pd.read_csv(tmp_path / "again" / "summary.csv")["time_vs_baseline"][2] == 1.0
    assert cli(str(tmp_path / "nothing"), main=main).code == 2


@pytest.mark.slow
def test_a_sweep_over_precisions_and_batch_sizes_compares_like_with_like(cli, tmp_path):
    folder = tmp_path / "sweep"
    ended = cli("-m", "backend=scratch,amp", "precision=fp16,bf16", *BASIC, "task.batch_size=32,64",
                f"hydra.sweep.dir={folder}")  # fmt: skip
    assert ended.code == 0, ended.err
    table = pd.read_csv(folder / "report" / "summary.csv")
    assert len(table) == 8
    assert len(table.groupby("batch_size")) == 2
    for row in table.itertuples():
        assert f"-amp-{row.precision}" in row.baseline
        assert table.set_index("run").loc[row.baseline].batch_size == row.batch_size


@pytest.mark.slow
def test_a_job_that_fails_is_a_row_and_the_others_finish(cli, tmp_path):
    folder = tmp_path / "sweep"
    ended = cli("-m", "backend=fp32,scratch", "precision=fp16", *BASIC, f"hydra.sweep.dir={folder}")
    assert ended.code == 1
    table = pd.read_csv(folder / "report" / "summary.csv")
    assert table["status"].tolist() == ["failed", "ok"]
    assert table["error"][0] == "precision=fp16: backend=fp32 accepts one of auto, fp32"
    assert table["error"][0] in ended.out


WRONG = ["task.optimizer.lr=0.01,nan", "task.batch_size=64,0", "train.steps=4,0", "task.model.hidden=[32],[0]"]


@pytest.mark.slow
@pytest.mark.parametrize("bad", WRONG)
def test_wrong_input_of_one_job_is_its_row(cli, tmp_path, bad):
    folder = tmp_path / "sweep"
    ended = cli("-m", "backend=amp", *BASIC, bad, f"hydra.sweep.dir={folder}")
    assert ended.code == 1
    table = pd.read_csv(folder / "report" / "summary.csv")
    assert table["status"].tolist() == ["ok", "failed"]
    assert bad.split("=")[0] in table["error"][1]


def test_wrong_input_of_every_job_is_one_line_and_an_exit_code(cli, tmp_path):
    ended = cli("-m", "backend=amp,fp32", *BASIC, "task.batch_size=641", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert ended.code == 2
    lines = [line for line in ended.err.splitlines() if line.startswith("mpcompare: error: ")]
    assert lines == ["mpcompare: error: task.batch_size=641: data=digits has only 640 samples"]
    assert "failed" not in ended.out
    assert not (tmp_path / "sweep" / "report").exists()


@pytest.mark.slow
def test_each_different_line_of_wrong_input_is_said_once(cli, tmp_path):
    ended = cli("-m", "backend=fp32", "task.batch_size=641,642", "seed=0,1", SMALL[1], *SMALL[3:],
                "data=synthetic", "data.samples=640", f"hydra.sweep.dir={tmp_path / 'sweep'}")  # fmt: skip
    assert ended.code == 2
    assert [line for line in ended.err.splitlines() if "samples" in line] == [
        "mpcompare: error: task.batch_size=641: data=synthetic has only 640 samples",
        "mpcompare: error: task.batch_size=642: data=synthetic has only 640 samples",
    ]


@pytest.mark.slow
def test_a_fault_of_a_backend_is_its_row_with_the_traceback_in_the_log(cli, tmp_path, monkeypatch):
    def broken(self):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(BACKENDS["amp"], "backward", broken)
    ended = cli("-m", "backend=amp,fp32", "hydra/launcher=basic", *SMALL, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert ended.code == 1
    table = pd.read_csv(tmp_path / "sweep" / "report" / "summary.csv")
    assert table["status"].tolist() == ["failed", "ok"]
    assert table["error"][0] == "ZeroDivisionError: a bug"
    assert "Traceback" in ended.out


@pytest.mark.slow
def test_a_sweep_into_a_used_folder_is_refused(cli, tmp_path):
    folder = tmp_path / "sweep"
    assert cli("-m", "backend=amp", *BASIC, f"hydra.sweep.dir={folder}").code == 0
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    ended = cli("-m", "backend=amp", *BASIC, "task.optimizer.lr=0.5", f"hydra.sweep.dir={folder}")
    assert ended.code == 2
    assert "hydra.sweep.dir=" in ended.err
    assert "already holds a run" in ended.err
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_a_report_that_cannot_be_drawn_is_a_failure(cli, tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "report").write_text("")
    ended = cli("-m", "backend=amp", *BASIC, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert ended.code == 2
    assert "the report cannot be drawn" in ended.err
    assert "amp" in ended.out


def test_help_and_cfg_are_quick_and_import_nothing_heavy():
    script = (
        "import sys; sys.argv = ['mpcompare', '{}']; from mpcompare.__main__ import main\n"
        "try: main()\nfinally: print('torch' in sys.modules, 'pandas' in sys.modules, 'matplotlib' in sys.modules)"
    )
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", script.format("--help")], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 10  # 0.3 s on a quiet machine; the bound that matters is the next line
    assert ended.stdout.splitlines()[-1] == "False False False"
    groups = (
        f"backend: {EVERY}",
        f"data: {DATA}",
        "loss_scale:",
        "experiment: ablations, accumulation, adamw, as_published, clipping, first_look, real_bugs, resume, seed",
    )
    for text in (*groups, "task:", "train:", "precision: auto", "python -m mpcompare -m backend=scratch,amp,fp32"):
        assert text in ended.stdout
    ended = subprocess.run(
        [sys.executable, "-m", "mpcompare", "--cfg", "job"], capture_output=True, text=True, check=True
    )
    assert "batch_size: 8192" in ended.stdout


@pytest.mark.slow
def test_experiment_seed_takes_every_step_of_an_epoch_from_the_first(cli, tmp_path):
    small = [a for a in SMALL if not a.startswith("train.")]
    ended = cli("+experiment=seed", *small, f"hydra.run.dir={tmp_path / 'run'}")
    assert ended.code == 0, ended.err
    steps = pd.read_csv(tmp_path / "run" / "steps.csv")
    assert len(steps) == 7
    assert not steps["warmup"].any()


@pytest.mark.slow
def test_the_first_look_ends_with_verdicts_and_a_page(cli, tmp_path):
    ended = cli("+experiment=first_look", "measure.budget_s=1", "hydra.sweep.dir=sweep")
    assert ended.code == 0, ended.err
    report = tmp_path / "sweep" / "report"
    verdicts = json.loads((report / "verdict.json").read_text())
    assert {name: v["word"] for name, v in verdicts.items()} == {
        "0-scratch-auto": "same", "1-amp-auto": "reference", "2-fp32-auto": "reference",
    }  # fmt: skip
    assert verdicts["0-scratch-auto"]["unchecked"] == []
    assert "scratch bf16: same so far (compared with amp bf16)" in ended.err.splitlines()
    assert ended.out.splitlines()[-1] == "Report: sweep/report/index.html"
    assert "same as" in (report / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("backend", ["scratch", "amp"])
def test_the_first_seven_losses_on_mnist_are_as_in_the_original_script(cli, tmp_path, mnist_root, backend):
    ended = cli("+experiment=seed", f"backend={backend}", "data=mnist", f"data.root={mnist_root}",
                "measure.budget_s=0.1", "verdict.enabled=false", f"hydra.run.dir={tmp_path / 'run'}")  # fmt: skip
    assert ended.code == 0, ended.err
    losses = pd.read_csv(tmp_path / "run" / "steps.csv")["loss"]
    original = [2.327, 2.237, 2.175, 2.117, 2.058, 2.006, 1.948]
    assert losses.tolist() == pytest.approx(original, abs=0.05)


BAD = {
    "unknown backend": (["backend=nope"], f"backend=nope: expected one of {EVERY}"),
    "unknown precision": (["precision=fp17"], "precision=fp17: expected one of auto, fp32, tf32, fp16, bf16"),
    "unknown data": (["data=imagenet"], f"data=imagenet: expected one of {DATA}"),
    "fp32 in fp16": (["backend=fp32", "precision=fp16"], "precision=fp16: backend=fp32 accepts one of"),
    "batch size 0": (["task.batch_size=0"], "task.batch_size=0: expected a whole number of at least 1"),
    "batch size too large": (["task.batch_size=641"], "task.batch_size=641: data=digits has only 640 samples"),
    "batch size negative": (["task.batch_size=-1"], "task.batch_size=-1: expected a whole number of at least 1"),
    "hidden 0": (["task.model.hidden=[0]"], "task.model.hidden=[0]: expected whole numbers of at least 1"),
    "steps 0": (["train.steps=0"], "train.steps=0: expected a whole number of at least 1"),
    "steps a word": (["train.steps=many"], "train.steps=many: expected a whole number of at least 1"),
    "warm-up negative": (["train.warmup_steps=-1"], "train.warmup_steps=-1: expected a whole number of at least 0"),
    "lr NaN": (["task.optimizer.lr=nan"], "task.optimizer.lr=nan: expected a finite number above 0"),
    "seed negative": (["seed=-1"], "seed=-1: expected a whole number of at least 0"),
    "seed too large": (["seed=4294967296"], "seed=4294967296: expected a whole number of at least 0 and at most 42949"),
    "seed a fraction": (["seed=1.5"], "seed=1.5: expected a whole number"),
    "no task": (["task=null"], "Config group override must be a string"),
    "a list of backends": (["backend=[amp,fp32]"], f"backend: expected one of {EVERY} (several: "),
    "no precision": (["precision=null"], "precision=None: expected one of auto, fp32"),
    "out of memory": (["task.model.hidden=[1000000000000]"], "out of memory, try a smaller task.batch_size"),
    "no such module": (
        ["task.model._target_=nope.Net"],
        "task.model._target_=nope.Net: there is no module nope",
    ),
    "not its arguments": (
        ["task.model._target_=torch.nn.Linear"],
        "task.model.hidden=[32]: Linear takes in_features, out_features, bias, device, dtype; leave it out with ~task",
    ),
    "no module at all": (
        ["task.model=7"],
        "task.model=7: expected the _target_ of a torch.nn.Module, and its arguments",
    ),
    "no section": (
        ["verdict=false"],
        "verdict=False: expected one of its values to be set, as in verdict.enabled=false",
    ),
    "no such class": (["backend._target_=nope.Nope"], "backend._target_=nope.Nope: "),
    "unknown key": (["train.step=3"], "Could not override 'train.step'"),
    "unknown key of train": (
        ["+train.foo=1"],
        "train.foo=1: train takes steps, warmup_steps, deterministic, checkpoint_every",
    ),
    "unknown rule": (["+measure.foo=1"], "measure.foo=1: measure takes rel_ci, budget_s, block_s"),
    "no steps": (["~train.steps"], "train.steps=: expected a value, there is none"),
    "unparsable": (["task.model.hidden=["], "task.model.hidden=[: "),
    "unknown engine": (["engine=cublas"], "engine=cublas: expected one of auto, native, torch"),
    "unknown device": (["device=tpu"], "device=tpu: expected one of auto, cpu, cuda"),
    "bad loss scale": (["loss_scale=dynamic", "loss_scale.growth_factor=1"], "loss_scale.growth_factor=1: expected"),
    "unknown accumulator": (
        ["backend.accumulate_dtype=fp8"],
        "backend.accumulate_dtype=fp8: expected one of fp32, fp16, bf16",
    ),
    "unknown softmax": (["backend.softmax=tf32"], "backend.softmax=tf32: expected one of fp32, fp16, bf16"),
    "masters a number": (["backend.master_params=1"], "backend.master_params=1: expected true or false"),
    "16-bit sums, native": (["backend.accumulate_dtype=fp16", "engine=native"], "engine=native: sums in fp32; "),
    "an option of none": (["backend=amp", "+backend.softmax=fp16"], "backend.softmax=fp16: backend=amp takes no opti"),
    "unknown option": (
        ["+backend.x=1"],
        "backend.x=1: backend=scratch takes engine, master_params, accumulate_dtype, softmax",
    ),
    "an argument of all": (
        ["+backend.task=1"],
        "backend.task=1: backend=scratch takes engine, master_params, accumulate_dtype, ",
    ),
    "data without the seed": (
        ["data=function", "data._target_=os.getcwd"],
        "data._target_=getcwd: expected a function that can be called with the seed (",
    ),
    "engine of a backend that has none": (
        ["backend=amp", "engine=foo"],
        "engine=foo: expected one of auto, native, tor",
    ),
    "no target": (["backend._target_=null"], "backend._target_=None: expected a backend's class ("),
    "strict a word": (["report.strict=perhaps"], "report.strict=perhaps: expected true or false"),
    "allow a number": (
        ["report.allow=5"],
        "report.allow=5: expected a list of names, such as [seed,task.optimizer.lr]",
    ),
    "baseline a list": (["report.baseline=[amp]"], "report.baseline=['amp']: expected the name of a backend"),
    "a job with a folder": (["hydra.job.name=a/b"], "hydra.job.name=a/b: expected a name for files, without /"),
    "not finite a word": (["train.not_finite=1"], "train.not_finite=1: expected true or false"),
    "output in a file": (["hydra.run.dir=file/run"], "hydra.run.dir=file/run: cannot write there (Not a directory)"),
}


@pytest.mark.parametrize("task", slow_after(1, ["imdb_lstm", "char_gpt"]))
def test_data_of_another_task_asks_for_what_this_task_does_not_say(cli, task):
    ended = cli("backend=fp32", f"task={task}", "data=digits")  # some CPUs have no LSTM in bf16
    assert ended.code == 2
    assert "mpcompare: error: data.samples=None: expected a whole number of at least 1" in ended.err


def test_a_network_that_cannot_be_called_with_the_data_of_another_task_says_so(cli):
    ended = cli("backend=amp", "task=char_gpt", "data=digits", "data.samples=96")
    assert ended.code == 2
    assert "task.model=CharGpt: cannot be called with data=digits, inputs [4, 1, 28, 28] float32" in ended.err


@pytest.mark.parametrize("case", slow_after(6, BAD))
def test_bad_input_is_one_line_and_an_exit_code(cli, tmp_path, case):
    arguments, message = BAD[case]
    (tmp_path / "file").write_text("")
    ended = cli(*SMALL, *arguments)
    assert ended.code == 2
    (line,) = [line for line in ended.err.splitlines() if not line.startswith("[")]
    assert line.startswith(f"mpcompare: error: {message}")
    assert not list(tmp_path.rglob("steps.csv"))
    assert all(json.loads(p.read_text())["status"] == "failed" for p in tmp_path.rglob("result.json"))


def test_an_unwritable_folder_of_a_sweep_is_found_before_the_first_job(cli, tmp_path):
    (tmp_path / "file").write_text("")
    ended = cli("-m", "backend=scratch,amp", *SMALL, "hydra.sweep.dir=file/sweep")
    assert ended.code == 2
    assert "hydra.sweep.dir=file/sweep: cannot write there" in ended.err
    assert "Launching" not in ended.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_where_there_is_none(cli):
    ended = cli(*SMALL, "device=cuda")
    assert ended.code == 2
    assert "device=cuda: torch " in ended.err
    assert "use device=cpu" in ended.err


@pytest.mark.slow
def test_a_second_run_into_the_same_folder_loses_nothing(cli, tmp_path):
    folder = tmp_path / "run"
    assert cli(*SMALL, f"hydra.run.dir={folder}").code == 0
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    ended = cli(*SMALL, f"hydra.run.dir={folder}", "backend=amp")
    assert ended.code == 2
    assert "already holds a run" in ended.err
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [False, True])
def test_ctrl_c_ends_in_seconds_and_leaves_every_finished_step(request, tmp_path, sweep):
    small = [a for a in SMALL if not a.startswith("train.steps")]
    where = ["-m", "backend=scratch,amp", f"hydra.sweep.dir={tmp_path}"] if sweep else [f"hydra.run.dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mpcompare", *where, *small, "train.steps=1000000", "train.checkpoint_every=2"],
        stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    request.addfinalizer(process.kill)
    deadline = time.time() + 120
    while not any(p.stat().st_size > 2000 for p in tmp_path.rglob("steps.csv")):
        assert process.poll() is None
        assert time.time() < deadline
        time.sleep(0.05)
    interrupted = time.time()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert time.time() - interrupted < 10
    assert process.returncode == 130
    assert f"mpcompare: interrupted; what was finished is written; the same command with resume={tmp_path} goes" in err
    assert "Traceback" not in err
    (path,) = tmp_path.rglob("steps.csv")
    steps = pd.read_csv(path)
    assert steps["step"].tolist() == list(range(1, len(steps) + 1))
    assert steps.drop(columns=["grad_norm", *MONITORED]).notna().all(axis=None)  # the dropped columns may be empty
    assert json.loads((path.parent / "result.json").read_text())["status"] == "interrupted"


def test_a_job_that_cannot_leave_a_record_is_not_forgotten(cli, tmp_path, monkeypatch):
    folder = tmp_path / "sweep"

    def vanish(self):
        shutil.rmtree(folder / "0-amp-auto")

    monkeypatch.setattr(BACKENDS["amp"], "backward", vanish)
    ended = cli("-m", "backend=amp,fp32", "hydra/launcher=basic", *SMALL, f"hydra.sweep.dir={folder}")
    assert ended.code == 2
    assert "cannot write there" in ended.err


@pytest.mark.slow
def test_what_cannot_be_resolved_is_a_row(cli, tmp_path):
    folder = tmp_path / "sweep"
    ended = cli("-m", "backend=amp", *BASIC, "seed=0,${nothing}", f"hydra.sweep.dir={folder}")
    assert ended.code == 1
    table = pd.read_csv(folder / "report" / "summary.csv")
    assert table["status"].tolist() == ["ok", "failed"]
    assert "nothing" in table["error"][1]


@pytest.mark.slow
def test_nothing_is_drawn_where_stderr_is_not_a_terminal(tmp_path):
    command = [sys.executable, "-m", "mpcompare", *SMALL, f"hydra.run.dir={tmp_path / 'run'}"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert ended.stderr == ""
    assert "\x1b" not in ended.stdout
    assert "scratch bf16" in ended.stdout
    assert str(Path("run")) in ended.stdout
