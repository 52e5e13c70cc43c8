"""The figure of all runs at a glance."""

import pytest
from support.records import write_run

from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.figures.glance import glance
from mpcompare.report.runs import find_runs
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word


def drawn(folder):
    (comparison,) = compare(find_runs([folder]), "amp")
    verdicts = {"0": Verdict(Word.REFERENCE), "1": Verdict(Word.SAME), "2": Verdict(Word.DIFFERS, "clip")}
    figure = glance(Report([comparison.judged(verdicts)], "amp"))
    figure.draw_without_rendering()
    return figure.axes


def test_ratios_are_over_the_baseline_and_what_differs_comes_first(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "fused", step_ms=5.0, peak_memory_bytes=1_000_000)
    write_run(tmp_path / "2", "mine", step_ms=20.0)
    time, memory = drawn(tmp_path)
    names = [text.get_text() for text in time.get_yticklabels()]
    assert names == ["mine bf16: differs ✗", "amp bf16: reference =", "fused bf16: same ✓"]
    assert [text.get_text() for text in time.texts] == ["2.00", "1.00", "0.50"]
    assert [text.get_text() for text in memory.texts] == ["1.00", "1.00", "0.50"]


@pytest.mark.slow
def test_a_ratio_without_an_interval_is_no_number(tmp_path):
    write_run(tmp_path / "0", "amp", blocks=[10.0, 10.0])
    write_run(tmp_path / "1", "fused", blocks=[5.0, 5.0])
    time, memory = drawn(tmp_path)
    assert [text.get_text() for text in time.texts] == ["1.00", "cannot be told"]
    assert [text.get_text() for text in memory.texts] == ["1.00", "1.00"]
