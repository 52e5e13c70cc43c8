"""The report on a console."""

import io
import itertools
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
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word

pytestmark = pytest.mark.usefixtures("undrawn")

NAMES = ["backend", "precision"]
COLUMNS = [
    "verdict", "ms/step p50", "time / amp bf16", "peak MB", "memory / amp bf16", "test acc.", "final loss",
    "max |loss - amp bf16|", "engine", "p20 - p80", "vs model",
]  # fmt: skip


def shown(tmp_path, monkeypatch, capsys, width, verdicts=None):
    """Returns the lines of the report on a console of this width, without the spaces at their ends."""
    terminal = Console(width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "Console", lambda **_: terminal)
    comparisons = [comparison.judged(verdicts or {}) for comparison in compare(find_runs([tmp_path]), "amp")]
    console.write(Report(comparisons, "amp"), tmp_path)
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(("width", "tables"), [(80, 3), (100, 2), (120, 2), (200, 1)])
def test_every_console_shows_all_columns_in_as_many_tables_as_it_needs(tmp_path, monkeypatch, capsys, width, tables):
    write_run(tmp_path / "0", "mine", step_ms=5.0)
    write_run(tmp_path / "1", "amp")
    verdicts = {"0": Verdict(Word.SAME, reference="1"), "1": Verdict(Word.REFERENCE, reference="1")}
    lines = shown(tmp_path, monkeypatch, capsys, width, verdicts)
    heads = [re.split(r"  +", line) for line in lines if line.startswith("backend ")]
    assert len(heads) == tables
    assert all(head[:2] == NAMES for head in heads)
    headings = [heading for head in heads for heading in head[2:]]
    broken = COLUMNS.index("max |loss - amp bf16|")  # into two lines where that saves a table
    assert headings[:broken] + headings[broken + 1 :] == COLUMNS[:broken] + COLUMNS[broken + 1 :]
    assert sum(line.startswith("mine  ") for line in lines) == tables
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)


@pytest.mark.parametrize(("width", "count"), [(80, 2), (120, 1)])
def test_a_narrow_console_shows_the_phases_in_two_tables_and_cuts_nothing(tmp_path, monkeypatch, capsys, width, count):
    write_run(tmp_path / "0", "amp", phase_ms=dict.fromkeys(("forward", "backward", "step", "update"), 0.0012345))
    lines = shown(tmp_path, monkeypatch, capsys, width)
    heads = [re.split(r"  +", line)[1:] for line in lines if line.startswith("ms in phase ")]
    assert len(heads) == count
    assert [*itertools.chain(*heads)] == [
        "forward",
        "backward",
        "step",
        "update",
        "clock's cost",
        "first step",
        "set-up s",
    ]
    assert "…" not in "".join(lines)


def test_verdicts_have_a_sign_and_a_colour_where_there_are_colours(tmp_path, monkeypatch):
    write_run(tmp_path / "0", "mine")
    write_run(tmp_path / "1", "amp")
    verdicts = {"0": Verdict(Word.DIFFERS, "loss", "it is", "1"), "1": Verdict(Word.REFERENCE, reference="1")}
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    contents = Report([comparison.judged(verdicts)], "amp")
    for no_color in (False, True):
        file = io.StringIO()
        terminal = Console(width=120, force_terminal=True, color_system="standard", no_color=no_color, file=file)
        monkeypatch.setattr(console, "Console", lambda terminal=terminal, **_: terminal)
        console.write(contents, tmp_path)
        assert ("\x1b[31m✗ differs: loss" in file.getvalue()) is not no_color
        assert "✗ differs: loss" in file.getvalue()


def test_a_console_shows_the_comparison_then_its_table_and_what_there_is_to_say(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "0", "mine", step_ms=5.0, losses=(2.0, 1.25, 1.125), peak_memory_bytes_analytic=None)
    write_run(tmp_path / "1", "amp", peak_memory_bytes_analytic=2_000_000)
    write_run(tmp_path / "2", "gone", status="failed", losses=())
    lines = [re.sub(r"  +", "  ", line) for line in shown(tmp_path, monkeypatch, capsys, 200)]
    ruled = [line for line in lines if line and set(line) != {"─"}]
    assert ruled == [
        "t, batch 8, seed 0, cpu",
        "data: synthetic (asked for)",
        "  ".join([*NAMES, *COLUMNS]),
        "mine  bf16  5  0.50 (0.50-0.50)  2  1.00  0.5000  1.12500  2.5e-01  torch  4 - 6  -",
        "amp  bf16  10  1  2  1  0.5000  1.00000  baseline  torch  9 - 11  +0.0 %",
        "gone  bf16  failed",
        "10 rounds of blocks, stopped because narrow enough: every ratio of two runs is known within 0.0 % (95 %)",
        "ms in phase  forward  backward  step  update  clock's cost  first step  set-up s",
        "mine bf16  4  5  1  0  in the noise  50  0.5",
        "amp bf16  4  5  1  0  in the noise  50  0.5",
        "gone bf16: failed: precision=fp16: no",
        "Right?  gone bf16 did not finish.",
        "Faster?  mine bf16 takes 0.50 times as long as amp bf16 (0.50 to 0.50).",
        "Smaller?  mine bf16 needs 2 MB, as much as amp bf16.",
    ]


def test_what_is_long_is_wrapped_at_words_and_in_a_pipe_no_line_ends_with_a_blank(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "0", "mine")
    write_run(tmp_path / "1", "amp")
    reason = "one reason and " * 20 + "another"
    verdicts = {"0": Verdict(Word.DIFFERS, "loss", reason, "1"), "1": Verdict(Word.REFERENCE, reference="1")}
    lines = shown(tmp_path, monkeypatch, capsys, 80, verdicts)
    assert max(map(len, lines)) <= 80
    assert f"mine bf16 differs: loss: {reason}" in " ".join(lines)
    monkeypatch.undo()
    console.write(Report(compare(find_runs([tmp_path]), "amp"), "amp"), tmp_path)
    assert [line for line in capsys.readouterr().out.splitlines() if line != line.rstrip()] == []


def test_each_answer_is_a_line_of_its_own_next_to_its_question(tmp_path, monkeypatch, capsys):
    for place, backend in enumerate(("mine", "amp", "other")):
        write_run(tmp_path / str(place), backend, step_ms=5.0 + place)
    lines = shown(tmp_path, monkeypatch, capsys, 80)
    begin = next(place for place, line in enumerate(lines) if line.startswith("Faster?"))
    assert lines[begin : begin + 3] == [
        "Faster?   mine bf16 takes 0.83 times as long as amp bf16 (0.83 to 0.83).",
        "other bf16 takes 1.17 times as long as amp bf16 (1.17 to 1.17).",
        "Smaller?  mine bf16 needs 2 MB, as much as amp bf16.",
    ]


def test_runs_that_fill_no_column_of_a_further_table_are_left_out_of_it(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "gone", status="failed", losses=())
    lines = shown(tmp_path, monkeypatch, capsys, 80)
    rows = [line.split()[0] for line in lines if line.startswith(("amp  ", "gone  ", "backend  "))]
    assert rows == ["backend", "amp", "gone", "backend", "amp", "backend", "amp"]


def test_runs_with_baselines_of_their_own_say_which(tmp_path, monkeypatch, capsys):
    for place, (backend, precision) in enumerate([("mine", "fp16"), ("amp", "bf16"), ("amp", "fp16")]):
        write_run(tmp_path / str(place), backend, precision)
    lines = [re.split(r"  +", line) for line in shown(tmp_path, monkeypatch, capsys, 200)]
    (head,) = (line for line in lines if line[0] == "backend")
    assert (head[4], head[9], head[-1]) == ("time / baseline", "max |loss - baseline|", "baseline")
    assert [line[-1] for line in lines if line[0] in ("mine", "amp")] == ["amp fp16", "amp bf16", "amp fp16"]


@pytest.mark.slow
def test_the_variant_stands_in_the_table(tmp_path, capsys):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", lr=0.25)
    write_run(tmp_path / "2", "mine", lr=0.5, status="failed", losses=())
    assert not report([tmp_path], tmp_path / "report", "amp", ["task"], formats=[])
    out = capsys.readouterr().out
    assert re.search(r"mine +bf16 +lr=0.25 +not examined", out.replace("- not", "not"))
    assert re.search(r"mine +bf16 +lr=0.5 +failed", out)


@pytest.mark.slow
def test_a_narrow_terminal_gets_whole_numbers(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "0", "scratch", step_ms=1234.5)
    write_run(tmp_path / "1", "amp", step_ms=12.345)
    monkeypatch.setattr(console, "Console", lambda **_: Console(width=80, force_terminal=True, color_system=None))
    report([tmp_path], tmp_path / "report", "amp", formats=[])
    out = capsys.readouterr().out
    assert "…" not in out
    for cell in ("scratch", "bf16", "1234", "12.35", "100.00", "not examined"):
        assert cell in out


@pytest.mark.slow
def test_the_phases_of_all_runs_are_shown_and_a_whole_step_is_one_of_its_own(tmp_path, capsys):
    write_run(tmp_path / "0", "graph", **WHOLE)
    write_run(tmp_path / "1", "amp", phase_overhead=0.25)
    write_run(tmp_path / "2", "other", phase_ms={"forward": 4.0, "backward": 3.0, "unscale": None, "step": None})
    assert report([tmp_path], tmp_path / "report", "amp", formats=[])
    out = capsys.readouterr().out
    assert re.search(r"ms in phase +forward +backward +step +update +whole step +clock's cost", out)  # nobody unscales
    assert re.search(r"graph bf16 +- +- +- +- +7\.5 +- +50 ", out)
    assert re.search(r"amp bf16 +4 +5 +1 +0 +- +\+25\.0 % +50 ", out)
    assert re.search(r"other bf16 +4 +3 +- +- +- +in the noise", out)
    summary = pd.read_csv(tmp_path / "report" / "summary.csv")
    assert summary["phase_whole_step_ms"].tolist()[0] == 7.5
    assert summary["phase_backward_ms"].tolist()[1:] == [5, 3]


def test_where_there_are_whole_steps_only_there_are_no_phases(tmp_path, capsys):
    write_run(tmp_path / "0", "amp", **WHOLE)
    assert report([tmp_path], tmp_path / "report", "amp", formats=[])
    assert re.search(r"ms in phase +whole step +clock's cost", capsys.readouterr().out)


def test_a_baseline_that_is_not_there_is_said(tmp_path, capsys):
    write_run(tmp_path / "0", "mine")
    report([tmp_path], tmp_path / "report", "amp", formats=[])
    assert "report.baseline=amp is not among the runs" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_still_prints_its_table(tmp_path, capsys):
    write_run(tmp_path / "0", "amp")
    (tmp_path / "report").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        report([tmp_path], tmp_path / "report", "amp")
    assert "amp" in capsys.readouterr().out
