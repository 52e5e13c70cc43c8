"""Lines beneath the table."""

import pandas as pd
from support.records import MEASURED, write_run

from mpcompare.report import remarks
from mpcompare.report.comparison import compare
from mpcompare.report.report import report
from mpcompare.report.runs import find_runs
from mpcompare.verdict.judge.verdict import Verdict


def test_what_could_not_be_checked_is_said_once_for_those_that_are_the_same(tmp_path):
    for i, backend in enumerate(("amp", "scratch", "fused", "wrong")):
        write_run(tmp_path / str(i), backend)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    unchecked = ["ReLU (examined as GELU)", "training (no noise was measured)"]
    verdicts = {
        "0": Verdict("reference"), "1": Verdict("same", unchecked=unchecked), "2": Verdict("same", unchecked=unchecked),
        "3": Verdict("differs", unchecked=unchecked),
    }  # fmt: skip
    assert remarks.unchecked(comparison, verdicts) == [
        "scratch bf16, fused bf16: not checked: ReLU (examined as GELU), training (no noise was measured)"
    ]


def test_memory_that_is_not_what_the_model_says_is_named(tmp_path, capsys):
    write_run(tmp_path / "0", "above", peak_memory_bytes_analytic=1_900_000, **MEASURED)
    write_run(tmp_path / "1", "close", peak_memory_bytes_analytic=1_910_000, **MEASURED)
    write_run(tmp_path / "2", "below", peak_memory_bytes_analytic=4_000_000)
    write_run(tmp_path / "3", "unknown", peak_memory_bytes_analytic=None, memory_model={})
    assert report([tmp_path], tmp_path / "report", "above")
    out = capsys.readouterr().out
    for cell in ("vs model", " +5.3 % ", " +4.7 % ", " -50.0 % ", " - "):
        assert cell in out
    assert (
        "above bf16: measured 0.1 MB (5.3 %) above the model; most of the peak: aten::mm 1.2 MB, aten::add 0.3" in out
    )
    assert "below bf16: measured 2.0 MB (50.0 %) below the model\n" in out
    assert "close bf16: measured" not in out
    assert "unknown bf16: measured" not in out
    summary = pd.read_csv(tmp_path / "report" / "summary.csv")
    assert summary["workspace_bytes"].tolist()[:2] == [14e6, 14e6]
    assert summary["peak_rss_bytes"].isna().tolist() == [False, False, True, True]


def test_who_computes_in_the_turns_of_others_is_named_and_other_programs_are_not_blamed_for_it(tmp_path, capsys):
    write_run(tmp_path / "0", "busy", out_of_turn=1.5, other_cores=0.1)
    write_run(tmp_path / "1", "amp", out_of_turn=0.0015, other_cores=1.6)
    write_run(tmp_path / "2", "later", out_of_turn=1.0, other_cores=1.6, race=None)
    report([tmp_path], tmp_path / "report")
    out = capsys.readouterr().out
    assert "busy bf16: kept 1.5 cores busy in the turns of others" in out
    assert out.count("in the turns of others") == 1
    assert "later bf16: other programs kept 1.6 cores busy while it was timed" in out
    assert out.count("other programs") == 1
