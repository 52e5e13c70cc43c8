"""``python -m mpcompare.scalers``: the table, the figure, and one line about what a user got wrong."""

import io
import math
from pathlib import Path

import pytest
from rich.console import Console
from support.scalers import all_by_policy, by_policy

from mpcompare.scalers import __main__ as command
from mpcompare.scalers import registry
from mpcompare.scalers.overflows import OverflowStep, _threshold, of_pattern
from mpcompare.scalers.registry import LIBRARIES
from mpcompare.scalers.table import said, show


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["scalers", *arguments])
    command.main()


def printed(traces, steps, width=80):
    output = io.StringIO()
    show(Console(file=output, width=width), traces, steps)
    return output.getvalue()


def row(text, start):
    return next(line.split() for line in text.splitlines() if line.split()[: len(start)] == start)


def test_the_table_has_the_scale_after_each_step_and_a_mark_where_it_was_skipped(monkeypatch, capsys):
    run(monkeypatch, "..x", "--only", "torch", "--init-scale", "1024", "--interval", "2")
    text = capsys.readouterr().out
    assert row(text, ["1"]) == ["1", "all", "2^10"]
    assert row(text, ["2"]) == ["2", "all", "2^11"]
    assert row(text, ["3"]) == ["3", "none", "2^10", "x"]
    assert row(text, ["torch"]) == ["torch", "2^10", "2^10", "1"]
    assert f"own code: torch {LIBRARIES['torch'].installed}" in text


def test_steps_repeat_a_pattern_and_cut_it(monkeypatch, capsys):
    run(monkeypatch, ".x", "--only", "torch", "--steps", "5")
    assert row(capsys.readouterr().out, ["torch"])[-1] == "2"
    run(monkeypatch, ".xx", "--only", "torch", "--steps", "2")
    assert row(capsys.readouterr().out, ["torch"])[-1] == "1"


def test_torch_is_always_there_and_nothing_twice(monkeypatch, capsys):
    monkeypatch.setattr(registry, "version", lambda package: "2" if package == "torch" else None)
    run(monkeypatch, "x", "--only", "flax,flax,torch")
    text = capsys.readouterr().out
    assert row(text, ["step"]) == ["step", "finite", "at", "torch", "flax"]
    assert "by the policies here: flax (not installed); pip install" in text


def test_scales_are_said_as_far_as_they_are_known():
    steps = [*of_pattern(".x"), OverflowStep(-math.inf, 0.5, unknown=True), _threshold(Path("x"), 1, "0.25"),
             _threshold(Path("x"), 1, "0")]  # fmt: skip
    assert [said(step) for step in steps] == ["all", "none", "< 2^-1", "<= 2^-2", "none"]


def test_a_library_that_fails_is_said_and_its_policy_stands_in(monkeypatch):
    def fails(policy):
        raise OSError("no such\n  device")

    monkeypatch.setattr(registry, "version", lambda package: "1.0")
    broken = registry.Library("keras", "keras", LIBRARIES["keras"].policy, fails)
    scaler, origin = broken.scaler(broken.policy)
    assert (scaler.scale, type(scaler)) == (2.0**15, type(broken.policy))
    assert origin == "keras (1.0 fails: OSError: no such device)"


def test_a_terminal_of_80_columns_shows_every_scale_in_full():
    steps = of_pattern("..x" * 9)
    text = printed(all_by_policy(steps), steps)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_of_many_steps_those_are_shown_at_which_something_happens():
    steps = of_pattern("." * 30 + "x" + "." * 30)
    text = printed([by_policy("torch", steps)], steps)
    assert row(text, ["31"]) == ["31", "none", "2^15", "x"]
    assert not any(line.split()[:1] == ["30"] for line in text.splitlines())
    assert "Of 61 steps, steps at which no scale changes and none is skipped are left out." in text
    steps = of_pattern("x" * 50)
    assert "10 later steps at which a scale changes or a step is skipped are left out." in printed(
        [by_policy("torch", steps)], steps
    )


def test_a_library_that_stops_is_said():
    steps = of_pattern("xxxx")
    text = printed([by_policy(name, steps, init_scale=2.0) for name in ("torch", "deepspeed")], steps)
    assert row(text, ["3"]) == ["3", "none", "2^-2", "x", "stops"]
    assert row(text, ["4"]) == ["4", "none", "2^-3", "x"]
    assert row(text, ["deepspeed"])[:3] == ["deepspeed", "2^1", "stopped"]
    assert "deepspeed: ends training with an error at step 3" in text


def test_steps_that_a_run_does_not_decide_are_counted(monkeypatch, capsys, tmp_path):
    (tmp_path / "steps.csv").write_text("loss_scale,skipped\n32768.0,False\n65536.0,True\n32768.0,False\n")
    run(monkeypatch, "--run", str(tmp_path), "--only", "torch", "--init-scale", "65536")
    text = capsys.readouterr().out
    assert row(text, ["1"])[1:3] == ["<=", "2^15"]
    assert row(text, ["2"])[1:3] == ["<", "2^16"]
    assert "which end as in the run: torch 1" in " ".join(text.split())


def test_scalers_begin_at_the_scale_of_the_run_and_torch_repeats_it(monkeypatch, capsys, tmp_path):
    (tmp_path / "steps.csv").write_text("loss_scale,skipped\n8.0,True\n4.0,False\n4.0,False\n8.0,True\n4.0,False\n")
    run(monkeypatch, "--run", str(tmp_path), "--only", "torch", "--interval", "2")
    text = capsys.readouterr().out
    assert [row(text, [str(step)])[3] for step in range(1, 6)] == ["2^2", "2^2", "2^3", "2^2", "2^2"]
    assert "says nothing" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["..y"], "PATTERN=..y: character 3 is 'y': expected a dot (finite) or an x (overflow)"),
        ([""], "PATTERN='': expected a dot for each finite step and an x for each overflow"),
        ([], "PATTERN=: expected one of PATTERN, --thresholds and --run"),
        ([".", "--run", "runs"], "PATTERN=.: expected one of PATTERN, --thresholds and --run"),
        ([".", "--only", "jax"], f"--only=jax: expected one of {', '.join(LIBRARIES)}"),
        ([".", "--steps", "0"], "--steps=0: expected a whole number of at least 1"),
        ([".", "--interval", "0"], "--interval=0: expected a whole number of at least 1"),
        ([".", "--init-scale", "0.5"], "--init-scale=0.5: expected at least 1, the min scale of three libraries"),
        ([".", "--init-scale", "nan"], "--init-scale=nan: expected a finite number above 0 and below 3.40282e+38"),
        (
            [".", "--init-scale", "3.4028236e38"],  # inf in fp32
            "--init-scale=3.4028236e+38: expected a finite number above 0 and below 3.40282e+38",
        ),
        (["--thresholds", "none.txt"], "--thresholds=none.txt: cannot read it (No such file or directory)"),
        (["y", "--out", "scales"], "--out=scales: expected a name that ends in one of .png, .svg, .pdf"),
        (["y", "--out", "no/s.png"], "--out=no/s.png: cannot write there (there is no folder no)"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert output.err == f"mpcompare: error: {message}\n"
    assert output.out == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x" * 200_000, "expected the folder of a run, with steps in steps.csv"),
        ("loss_scale,skipped\n0.5,True\n", "jmp cannot begin at its first loss scale, 0.5: give another --init-scale"),
    ],
)
def test_a_run_that_tells_a_scaler_nothing_is_one_line(monkeypatch, capsys, tmp_path, text, message):
    (tmp_path / "steps.csv").write_text(text)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--run", str(tmp_path))
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"mpcompare: error: --run={tmp_path}: {message}\n"


@pytest.mark.parametrize(
    ("out", "start"),
    [
        pytest.param("f.png", b"\x89PNG", marks=pytest.mark.slow),
        ("f.svg", b"<?xml"),
        pytest.param("f.pdf", b"%PDF", marks=pytest.mark.slow),
    ],
)
def test_the_figure_is_written(monkeypatch, capsys, tmp_path, out, start):
    run(monkeypatch, "x", "--only", "torch", "--out", str(tmp_path / out))
    assert (tmp_path / out).read_bytes().startswith(start)
    assert capsys.readouterr().out.endswith(f"wrote {tmp_path / out}\n")
