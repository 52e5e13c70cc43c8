"""Reports on folders of runs, from the command line and after a sweep."""

import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest
from support.command import SMALL
from support.records import write_run

from mpcompare.report.__main__ import main as report_main
from mpcompare.report.dtypes import ROLES
from mpcompare.report.report import FILES, report


@pytest.mark.slow
def test_the_command_line_of_the_report_allows_and_refuses(cli, tmp_path):
    write_run(tmp_path / "A", "amp", allow=["seed"])
    write_run(tmp_path / "B", "mine", seed=1)
    folders, out = (str(tmp_path / "A"), str(tmp_path / "B")), ("--formats", "--out", str(tmp_path / "out"))
    ended = cli(*folders, *out, main=report_main)
    assert ended.code == 0, ended.err  # as the first run was configured
    assert "NOT THE SAME: seed (report.allow)" in ended.out
    ended = cli(*folders, *out, "--allow", main=report_main)
    assert ended.code == 2
    assert ended.err.startswith("mpcompare: error: seed=0 in A, seed=1 in B: these are not one comparison; ")
    assert cli(*folders, *out, "--allow", "task.optimizer", "seed", main=report_main).code == 0
    ended = cli(*folders, *out, "--allow", "sed", main=report_main)
    assert ended.code == 2
    assert ended.err.startswith("mpcompare: error: report.allow=sed: expected one of task, task._target_, ")


@pytest.mark.slow
def test_a_sweep_over_seeds_and_two_runs_of_different_seeds(cli, tmp_path):
    ended = cli("-m", "backend=amp,fp32", "seed=0,1", *SMALL, "hydra/launcher=basic", "hydra.sweep.dir=sweep")
    assert ended.code == 0, ended.err
    summary = pd.read_csv(tmp_path / "sweep" / "report" / "summary.csv").set_index("run")
    assert (summary["seed"] == summary.loc[summary["baseline"], "seed"].to_numpy()).all()
    assert summary["not_the_same"].isna().all()
    for seed in (0, 1):
        assert cli("backend=amp", f"seed={seed}", *SMALL, "hydra/launcher=basic", f"hydra.run.dir=run{seed}").code == 0
    ended = cli("run0", "run1", "--out", "out", main=report_main)
    assert ended.code == 2
    line = ended.err.splitlines()[-1]
    assert line.startswith("mpcompare: error: seed=0 in run0, seed=1 in run1; ")
    assert "; initial_weights=" in line
    allow = re.search(r"--allow (.*) of python", line).group(1).split()
    ended = cli("run0", "run1", "--out", "out", "--allow", *allow, main=report_main)
    assert ended.code == 0, ended.err
    assert "NOT THE SAME: seed, " in ended.out
    assert cli("sweep", "run0", "run1", "--out", "out", main=report_main).code == 0  # the sweep has both seeds


@pytest.mark.slow
def test_a_report_that_is_refused_after_a_sweep_loses_nothing(cli, tmp_path):
    ended = cli(
        "-m", "backend=amp", "seed=0,1", *SMALL, "hydra/launcher=basic", "report.allow=[seed]", "hydra.sweep.dir=sweep"
    )
    assert ended.code == 2
    line = ended.err.splitlines()[-1]
    assert line.startswith("mpcompare: error: the report cannot be drawn: ")
    assert re.search(r"report.allow=\[seed,(dataset_fingerprint,)?initial_weights\]", line)
    assert len(list((tmp_path / "sweep").glob("*/result.json"))) == 2
    ended = cli("-m", "backend=amp", *SMALL, "hydra/launcher=basic", "report.allow=[sed]", "hydra.sweep.dir=other")
    assert ended.code == 2
    assert "report.allow=sed: expected one of task, " in ended.err
    assert not list((tmp_path / "other").rglob("result.json"))  # said before the first job


def test_outputs_write_the_files_for_which_there_is_something_to_show(tmp_path):
    write_run(tmp_path / "0", "mine")
    write_run(tmp_path / "1", "amp")
    assert report([tmp_path], tmp_path / "report", "amp")
    always = {"summary.csv", "summary.md", "verdict.json", "index.html"}
    always |= {"glance.png", "loss.png", "step_time.png", "phases.png", "memory.png", "noise.png"}
    assert {path.name for path in (tmp_path / "report").iterdir()} == always
    layer = {"kind": "Linear", **dict.fromkeys(ROLES, "bf16")}
    way = {"test_accuracy": 0.5, "test_loss": 1.0, "latency_ms": 1.0}
    more = {"module_dtypes": {"layer1": layer}, "inference": {"batch_size": 8, "ways": {"fp32": way}}}
    write_run(tmp_path / "2", "more", **more)
    assert report([tmp_path], tmp_path / "more", "amp")
    written = {path.name for path in (tmp_path / "more").iterdir()}
    assert written == always | {"dtypes.csv", "dtypes.png", "inference.csv"}
    assert written <= set(FILES)


@pytest.mark.usefixtures("undrawn")
def test_the_files_of_an_earlier_report_are_gone(tmp_path):
    write_run(tmp_path / "0", "amp")
    out = tmp_path / "report"
    out.mkdir()
    (out / "loss.pdf").write_text("drawn by somebody else")
    (out / "index.html").write_text("<!DOCTYPE html>a page of somebody else")
    assert report([tmp_path], out, "amp", formats=["tex"])
    assert {"summary.tex", "loss.pdf"} <= {path.name for path in out.iterdir()}
    for name in ("loss.svg", "dtypes.csv", "own.csv"):
        (out / name).write_text("")
    assert report([tmp_path], out, "amp", formats=[])
    assert {path.name for path in out.iterdir()} == {
        "summary.csv",
        "summary.md",
        "verdict.json",
        "index.html",
        "own.csv",
    }


@pytest.mark.slow
def test_figures_and_the_table_are_written_in_the_formats_asked_for(cli, tmp_path):
    write_run(tmp_path / "0", "amp")

    def written(*options):
        assert cli(str(tmp_path / "0"), "--out", str(tmp_path / "out"), *options, main=report_main).code == 0
        files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        shutil.rmtree(tmp_path / "out")
        return files

    names = {"glance", "loss", "step_time", "phases", "memory"}
    assert {name for name in written() if name.endswith("png")} == {f"{name}.png" for name in names}
    asked = ("--formats", "svg", "pdf", "tex")
    files = written(*asked)
    assert {"summary.tex"} | {f"{name}.{suffix}" for name in names for suffix in ("svg", "pdf")} <= set(files)
    assert not any(name.endswith("png") for name in files)
    assert files["loss.svg"].startswith(b"<?xml")
    assert files["loss.pdf"].startswith(b"%PDF")
    assert b"/Type3" not in files["loss.pdf"]
    assert written(*asked) == files  # no date, and no random names
    assert set(written("--formats")) == {"summary.csv", "summary.md", "verdict.json", "index.html"}


def test_a_format_that_is_not_known_is_one_line_before_anything_is_computed(cli, tmp_path):
    write_run(tmp_path / "0", "amp")
    ended = cli(str(tmp_path / "0"), "--formats", "png", "gif", main=report_main)
    expected = "expected a list of png, svg, pdf, tex, such as [png,svg], or []"
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"mpcompare: error: report.formats=gif: {expected}\n"
    for command in (("hydra.run.dir=run",), ("-m", "hydra/launcher=basic", "hydra.sweep.dir=run")):
        for value, named in (("[png,gif]", "gif"), ("svg", "svg"), ("null", "None")):
            ended = cli(*command, "backend=amp", *SMALL, f"report.formats={value}")
            assert ended.code == 2
            assert ended.err.splitlines()[-1] == f"mpcompare: error: report.formats={named}: {expected}"
    assert not list((tmp_path / "run").rglob("result.json"))


def test_the_report_imports_no_torch():
    script = "import sys, mpcompare.report.report; assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_report_is_drawn_without_torch(tmp_path):
    """The process that launches a sweep draws its report, and torch would take seconds and hundreds of megabytes."""
    write_run(tmp_path / "0", "mine")
    write_run(tmp_path / "1", "amp")
    script = (
        "import sys, mpcompare.__main__, mpcompare.command.callbacks, mpcompare.command.launcher\n"
        "from mpcompare.report.__main__ import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "report" / "summary.csv").exists()
