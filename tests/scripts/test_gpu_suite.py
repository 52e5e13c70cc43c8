"""The scripts for a GPU, as far as a CPU can run them."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile

import backend_of
import bench_ops
import describe_machine
import keep_results
import one_step
import pandas as pd
import pytest
import roofline
import suite_tables
import torch
import work
from support.command import SMALL
from support.tasks import mlp_of

from mpcompare.paths import CONF

SCRIPTS = CONF.parent / "scripts"
TINY = ("--device", "cpu", "--batch", "64", "--hidden", "32")


@pytest.fixture
def run(cli):
    """Returns a function that runs a script's main with some arguments, and returns the text that it prints."""

    def run(script, *arguments):
        ended = cli(*map(str, arguments), main=script.main)
        assert ended.code == 0, ended.err
        return ended.out

    return run


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_suite_ends_at_once_and_writes_nothing(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(SCRIPTS / "gpu_suite.sh"), str(tmp_path / "out")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    assert ended.stderr == f"gpu_suite: no GPU to run on: torch {torch.__version__} sees no GPU\n"
    assert ended.stdout == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_tests_of_the_suite_are_found():
    script = (SCRIPTS / "gpu_suite.sh").read_text()
    (options,) = re.findall(r'addopts="(.*?)"', script)
    ignored = re.findall(r"--ignore=(tests/\S+)", script)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-o", f"addopts={options}", "-m", "cuda"]
    command += ["tests", *(f"--ignore={path}" for path in ignored)]
    ended = subprocess.run(command, cwd=CONF.parent, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-500:]
    (found,) = re.findall(r"(\d+)/\d+ tests collected", ended.stdout)
    assert int(found) > 900


@pytest.mark.slow
def test_a_step_is_profiled_by_phases(run):
    for name in ("fused", "amp"):
        said = run(one_step, name, *TINY, "--precision", "bf16")
        assert said.startswith(f"{name} bf16 on cpu: loss 2.3")


def test_the_clock_of_a_gpu_is_told():
    rows = [{"clock_mhz": 1900.0 + r, "throttle": "none"} for r in range(3)]
    assert bench_ops.describe_clocks(rows) == "SM clock 1900 to 1902 MHz, median 1901; held back by: none 100 %"


@pytest.mark.slow
def test_operators_are_timed_against_torch(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_ops, "cpu_peaks", lambda: {"fp32": 100.0, "fp16": 100.0, "bf16": 200.0})
    run(bench_ops, *TINY, "--params", 100, "--rounds", 2, "--csv", tmp_path / "a.csv")
    table = pd.read_csv(tmp_path / "a.csv")
    assert list(table) == list(pd.read_csv(CONF.parent / "docs" / "bench" / "ops.csv"))
    assert len(table) == 3 * (5 + 3)
    first = table.iloc[0]
    assert first["GFLOP/s"] == pytest.approx(2 * 64 * 784 * 32 / first["ms"] / 1e6)
    assert first["GB/s"] == pytest.approx(4 * (64 * 784 + 784 * 32 + 64 * 32) / first["ms"] / 1e6)
    assert first["share of peak"] == pytest.approx(first["GFLOP/s"] / 100)


def finished_suite(folder, run, cli, monkeypatch):
    """Makes the files that gpu_suite.sh leaves in its folder, in the smallest sizes."""
    monkeypatch.setattr(bench_ops, "cpu_peaks", lambda: {"fp32": 100.0, "fp16": 100.0, "bf16": 200.0})
    monkeypatch.setattr(roofline, "BLOCK_S", 0.005)
    (folder / "logs").mkdir(parents=True)
    run(describe_machine, folder / "machine.json", "--device", "cpu", "--dataset", "digits")
    sweep = f"hydra.sweep.dir={folder / 'default'}"
    assert cli("-m", "backend=amp,fp32", "hydra/launcher=basic", "verdict.noise=1", sweep, *SMALL).code == 0
    run(bench_ops, *TINY, "--params", 100, "--rounds", 2, "--csv", folder / "ops.csv")
    sizes = ("--size", 64, "--megabytes", 1, "--data", "digits", "--backends", "fused", "amp")
    run(roofline, *TINY, *sizes, "--csv", folder / "roofline.csv", "--png", folder / "roofline.png")
    (folder / "ncu.log").write_text(NCU)
    (folder / "logs" / "memcheck.log").write_text("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n")
    (folder / "parts.csv").write_text('part,result,seconds,said\nbuild,ok,30,"done"\n')


NCU = """==PROF== Connected to process 1 (/usr/bin/python3)
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","void (anonymous namespace)::head<__half, 4>(const float *)","gpu__time_duration.sum","ns","64,128"
"0","void (anonymous namespace)::head<__half, 4>(const float *)","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","81.25"
"1","nvjet_hsh_256x128","gpu__time_duration.sum","ns","133000"
"""  # noqa: E501


@pytest.mark.slow
def test_a_finished_suite_becomes_tables_and_a_page(run, cli, tmp_path, monkeypatch):
    folder = tmp_path / "suite"
    finished_suite(folder, run, cli, monkeypatch)
    table = pd.read_csv(folder / "roofline.csv")
    ceilings = table[table["kind"] == "ceiling"]
    assert set(ceilings["name"]) == {"product, fp32", "product, bf16", "product, fp16", "copy"}
    point = table[(table["backend"] == "fused") & (table["name"] == "backward")].iloc[0]
    assert point["TFLOP/s"] == pytest.approx(point["flops"] / point["ms"] / 1e9)
    assert point["TB/s"] == pytest.approx(point["bytes"] / point["ms"] / 1e9)
    assert point["flops"] == work.phases(mlp_of(backend_of.mnist_mlp(64, 32)), "bf16")["backward"].flops

    out = run(suite_tables, folder)
    titles = [line[3:] for line in out.splitlines() if line.startswith("== ")]
    assert titles == [title for title, *_ in suite_tables.SECTIONS if title != "racecheck"]
    assert "cannot be shown" not in out
    assert "ERROR SUMMARY: 0 errors" in out
    assert pd.read_csv(folder / "ncu.csv").to_dict("list")["kernel"] == ["head", "nvjet_hsh_256x128"]
    assert pd.read_csv(folder / "ncu.csv")["us"].tolist() == [64.128, 133.0]
    memory = pd.read_csv(folder / "memory.csv")
    assert memory["backend"].tolist() == ["amp", "fp32"]
    assert memory["difference %"].iloc[1] == pytest.approx(0, abs=0.1)

    with tarfile.open(tmp_path / "results.tar.gz", "w:gz") as tar:
        tar.add(folder, ".")
    (folder / "ops.csv").write_text("cut off")
    ended = cli(str(folder), main=suite_tables.main)
    assert ended.code == 1  # says so, and shows the others
    assert "== operators in fp16; ops.csv has the others\ncannot be shown: KeyError" in ended.out
    assert "== comparison\ndefault\n" in ended.out
    shutil.rmtree(folder)
    to = tmp_path / "results"
    run(keep_results, tmp_path / "results.tar.gz", "--to", to)
    (kept,) = to.iterdir()
    machine = json.loads((kept / "machine.json").read_text())
    page = (kept / "README.md").read_text()
    assert page.startswith(f"# {machine['device_name']}\n")
    for said in (machine["commit"] or "", machine["versions"]["torch"], "| mnist_mlp | fp32 | fp32 | torch |",
                 "![roofline](roofline.png)", "![step time](default/report/step_time.png)"):  # fmt: skip
        assert said in page
    for name in ("default/report/summary.csv", "default/report/verdict.json", "memory.csv", "roofline.png"):
        assert (kept / name).exists()
    assert [path.name for path in (kept / "default").iterdir()] == ["report"]  # no records of single runs


def test_what_the_sanitizer_found_until_it_was_stopped_is_counted():
    log = "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 4 bytes\n=========     at head\n"
    assert suite_tables.sanitized(log).splitlines() == [
        "no summary; findings until it ended: 1", "Invalid __global__ write of size 4 bytes",
    ]  # fmt: skip
