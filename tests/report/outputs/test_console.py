"""The report on a console."""

import re

import pandas as pd
import pytest
from rich.console import Console
from support.records import WHOLE, write_run

from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.outputs import console
from mpcompare.report.report import report
from mpcompare.report.runs import find_runs

COLUMNS = {  # by the narrowest console that shows them
    80: ["backend", "precision", "ms/step p50", "x amp bf16", "peak MB", "verdict"],
    100: ["backend", "precision", "ms/step p50", "x amp bf16", "peak MB", "max |loss - amp bf16|", "verdict"],
    160: ["backend", "precision", "engine", "ms/step p50", "p20 - p80", "x amp bf16", "peak MB", "vs model",
          "final loss", "max |loss - amp bf16|", "test acc.", "verdict"],
}  # fmt: skip


def shown(tmp_path, monkeypatch, capsys, width):
    """Returns the lines of the report on a console of this width, without the spaces at their ends."""
    terminal = Console(width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "Console", lambda **_: terminal)
    comparisons = compare(find_runs([tmp_path]), "amp")
    console.write(Report(comparisons, {}, "amp"), tmp_path)
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("width", "columns", "phases"),
    [(80, 80, []), (99, 80, []), (120, 100, ["clock's cost", "first step", "set-up s"]),
     (160, 160, ["clock's cost", "first step", "set-up s"]), (200, 160, ["clock's cost", "first step", "set-up s"])],
)  # fmt: skip
def test_a_wider_console_shows_more_columns(tmp_path, monkeypatch, capsys, width, columns, phases):
    write_run(tmp_path / "0", "mine", step_ms=5.0)
    write_run(tmp_path / "1", "amp")
    lines = shown(tmp_path, monkeypatch, capsys, width)
    heads = [re.split(r"  +", line) for line in lines if line.startswith(("backend ", "ms in phase "))]
    assert heads == [COLUMNS[columns], ["ms in phase", "forward", "backward", "step", "update", *phases]]


def test_a_console_shows_the_comparison_then_its_table_and_what_there_is_to_say(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "0", "mine", step_ms=5.0, losses=(2.0, 1.25, 1.125), peak_memory_bytes_analytic=None)
    write_run(tmp_path / "1", "amp", peak_memory_bytes_analytic=2_000_000)
    write_run(tmp_path / "2", "gone", status="failed", losses=())
    lines = [re.sub(r"  +", "  ", line) for line in shown(tmp_path, monkeypatch, capsys, 200)]
    ruled = [line for line in lines if line and set(line) != {"─"}]
    assert ruled == [
        "t, batch 8, seed 0, cpu",
        "synthetic: asked for",
        "  ".join(COLUMNS[160]),
        "mine  bf16  torch  5  4 - 6  2.00 (2.00-2.00)  2  -  1.12500  2.5e-01  0.5000",
        "amp  bf16  torch  10  9 - 11  1.00  2  +0.0 %  1.00000  baseline  0.5000",
        "gone  bf16  failed",
        "10 rounds of blocks, stopped because narrow enough: every ratio is known within 0.0% (95 %)",
        "ms in phase  forward  backward  step  update  clock's cost  first step  set-up s",
        "mine bf16  4  5  1  0  +1.0%  50  0.5",
        "amp bf16  4  5  1  0  +1.0%  50  0.5",
        "gone bf16: failed: precision=fp16: no",
    ]


def test_runs_with_baselines_of_their_own_say_which(tmp_path, monkeypatch, capsys):
    for place, (backend, precision) in enumerate([("mine", "fp16"), ("amp", "bf16"), ("amp", "fp16")]):
        write_run(tmp_path / str(place), backend, precision)
    lines = [re.split(r"  +", line) for line in shown(tmp_path, monkeypatch, capsys, 200)]
    (head,) = (line for line in lines if line[0] == "backend")
    assert (head[5], head[9], head[-1]) == ("x baseline", "max |loss - baseline|", "baseline")
    assert [line[-1] for line in lines if line[0] in ("mine", "amp")] == ["amp fp16", "amp bf16", "amp fp16"]


def test_the_variant_stands_in_the_table(tmp_path, capsys):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", lr=0.25)
    write_run(tmp_path / "2", "mine", lr=0.5, status="failed", losses=())
    assert not report([tmp_path], tmp_path / "report", "amp", ["task"])
    out = capsys.readouterr().out
    assert re.search(r"mine +bf16 +lr=0.25 +torch", out)
    assert re.search(r"mine +bf16 +lr=0.5 +failed", out)


def test_a_narrow_terminal_gets_whole_numbers_in_fewer_columns(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "0", "scratch", step_ms=1234.5)
    write_run(tmp_path / "1", "amp", step_ms=12.345)
    monkeypatch.setattr(console, "Console", lambda **_: Console(width=80, force_terminal=True, color_system=None))
    report([tmp_path], tmp_path / "report", "amp")
    out = capsys.readouterr().out
    assert "…" not in out
    for cell in ("scratch", "bf16", "1234", "12.35", "0.01", "not examined"):
        assert cell in out


def test_phases_are_those_of_all_runs_and_a_whole_step_is_one_of_its_own(tmp_path, capsys):
    write_run(tmp_path / "0", "graph", **WHOLE)
    write_run(tmp_path / "1", "amp")
    write_run(tmp_path / "2", "other", phase_ms={"forward": 4.0, "backward": 3.0, "unscale": None, "step": None})
    assert report([tmp_path], tmp_path / "report", "amp")
    out = capsys.readouterr().out
    assert re.search(r"ms in phase +forward +backward +step +update +whole step +clock's cost", out)  # nobody unscales
    assert re.search(r"graph bf16 +- +- +- +- +7\.5 +- +50 ", out)
    assert re.search(r"amp bf16 +4 +5 +1 +0 +- +\+1\.0% +50 ", out)
    assert re.search(r"other bf16 +4 +3 +- +- +- +\+1\.0%", out)
    summary = pd.read_csv(tmp_path / "report" / "summary.csv")
    assert summary["whole_step_ms"].tolist()[0] == 7.5
    assert summary["backward_ms"].tolist()[1:] == [5, 3]


def test_where_there_are_whole_steps_only_there_are_no_phases(tmp_path, capsys):
    write_run(tmp_path / "0", "amp", **WHOLE)
    assert report([tmp_path], tmp_path / "report", "amp")
    assert re.search(r"ms in phase +whole step +clock's cost", capsys.readouterr().out)


def test_a_baseline_that_is_not_there_is_said(tmp_path, capsys):
    write_run(tmp_path / "0", "mine")
    report([tmp_path], tmp_path / "report", "amp")
    assert "report.baseline=amp is not among the runs" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_still_prints_its_table(tmp_path, capsys):
    write_run(tmp_path / "0", "amp")
    (tmp_path / "report").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        report([tmp_path], tmp_path / "report", "amp")
    assert "amp" in capsys.readouterr().out
