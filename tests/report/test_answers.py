"""The three answers of a report."""

import math

import pandas as pd
import pytest
from support.records import write_run

from mpcompare.report.answers import answers, first_clause
from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.outputs import data
from mpcompare.report.runs import find_runs
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word

LONGEST = 30  # words of a sentence


def said(folder, verdicts=None):
    """Returns the answers on the runs in a folder by their questions, as plain text."""
    (comparison,) = compare(find_runs([folder]), "amp")
    found = answers(comparison.judged(verdicts or {}))
    for answer in found:
        for sentence in answer.sentences:
            assert len("".join(sentence).split()) <= LONGEST, "".join(sentence)
    return {answer.question: " ".join(answer.lines()) for answer in found}


def test_what_is_wrong_comes_first_then_what_is_not_known_then_what_is_right_then_what_is_gone(tmp_path):
    for place, backend in enumerate(("mine", "amp", "bad", "blind", "other", "plain")):
        write_run(tmp_path / str(place), backend)
    write_run(tmp_path / "6", "gone", status="failed", losses=())
    verdicts = {
        "0": Verdict(Word.SAME, reference="1"),
        "1": Verdict(Word.REFERENCE, reference="1"),
        "2": Verdict(Word.DIFFERS, "bias sum", "only bias gradients are wrong (a.bias and 3 more), a.bias is off", "1"),
        "3": Verdict(Word.NOT_SEEN, "a", "no layers are seen, and an error of 10 % may hide in a: it is as large", "1"),
        "4": Verdict(Word.SAME, reference="1"),
        "5": Verdict(Word.DIFFERS_AS_DECLARED, "no master weights", reference="1"),
    }
    assert said(tmp_path, verdicts)["Right?"] == (
        "bad bf16 does not compute the same as amp bf16 (bias sum): only bias gradients are wrong. "
        "blind bf16 may be wrong: no layers are seen, and an error of 10 % may hide in a. "
        "plain bf16 differs from amp bf16 only as declared (no master weights). "
        "mine bf16 and other bf16 compute the same as amp bf16 (0 checks). gone bf16 did not finish."
    )


def test_a_combination_that_is_refused_comes_after_the_only_answer(tmp_path):
    write_run(tmp_path / "0", "amp", "fp16")
    write_run(tmp_path / "1", "fp32", "fp16", status="failed", losses=(), wrong_input=True)
    write_run(tmp_path / "2", "tf32", "fp16", status="failed", losses=(), wrong_input=True)
    assert said(tmp_path, {"0": Verdict(Word.REFERENCE, reference="0")})["Right?"] == (
        "amp fp16 is the reference, and there is nothing to compare with it. "
        "fp32 fp16 and tf32 fp16 were refused: precision=fp16: no."
    )


def test_a_reference_alone_and_one_in_doubt(tmp_path):
    write_run(tmp_path / "0", "amp")
    assert (
        "there is nothing to compare with it" in said(tmp_path, {"0": Verdict(Word.REFERENCE, reference="0")})["Right?"]
    )
    doubted = {"0": Verdict(Word.REFERENCE, because="the output of norm is itself 30 % off: squares above 65504")}
    assert said(tmp_path, doubted)["Right?"] == (
        "amp bf16 is a reference in doubt: the output of norm is itself 30 % off."
    )


def test_many_runs_are_counted(tmp_path):
    write_run(tmp_path / "amp", "amp")
    for place in range(12):
        write_run(
            tmp_path / f"{place:02}", f"b{place:02}", step_ms=9.0 - place / 2, peak_memory_bytes=10**6 * (12 - place)
        )
    verdicts = {f"{place:02}": Verdict(Word.DIFFERS, "loss", "it is", "amp") for place in range(6)}
    verdicts |= {f"{place:02}": Verdict(Word.SAME, reference="amp") for place in range(6, 12)}
    found = said(tmp_path, verdicts)
    assert found["Right?"].count("does not compute the same as amp bf16 (loss)") == 4
    assert "b04 bf16 and b05 bf16 do not, either." in found["Right?"]
    assert "b11 bf16, b10 bf16, b09 bf16 and 3 more compute the same as amp bf16" in found["Right?"]
    assert found["Faster?"].startswith("b11 bf16 takes 0.35 times as long as amp bf16 (0.35 to 0.35).")
    assert found["Faster?"].endswith("b07 bf16, b06 bf16, b05 bf16 and 5 more: the table has their times.")
    assert found["Smaller?"].startswith("b11 bf16 needs 1 MB, 0.50 times the 2 MB of amp bf16.")
    assert found["Smaller?"].endswith(
        "b05 bf16, b04 bf16, b03 bf16 and 3 more need 3.50 to 6.00 times the memory of amp bf16, and do not compute "
        "the same."
    )


def test_a_ratio_without_an_interval_is_no_number(tmp_path):
    write_run(tmp_path / "0", "amp", blocks=[10.0])
    write_run(tmp_path / "1", "mine", step_ms=5.0, blocks=[5.0])
    assert (
        said(tmp_path)["Faster?"]
        == "mine bf16 may be faster or slower: 1 round was timed, and 6 are needed (measure.budget_s)."
    )


def test_other_programs_are_named_where_they_may_be_the_reason_for_few_rounds(tmp_path):
    write_run(tmp_path / "0", "amp", blocks=[10.0])
    write_run(tmp_path / "1", "mine", step_ms=5.0, blocks=[5.0], other_cores=1.7)
    assert said(tmp_path)["Faster?"].endswith("(measure.budget_s). Other programs kept cores busy meanwhile.")


def test_the_blocks_of_a_baseline_may_be_the_few(tmp_path):
    write_run(tmp_path / "0", "amp", blocks=[10.0] * 4)
    write_run(tmp_path / "1", "mine", step_ms=5.0, blocks=[5.0] * 8)
    assert said(tmp_path)["Faster?"].startswith(
        "mine bf16 may be faster or slower: 4 rounds were timed, and 6 are needed ("
    )


def test_the_baseline_is_the_fastest_only_where_every_ratio_tells(tmp_path):
    write_run(tmp_path / "0", "amp", blocks=[10.0] * 8)
    write_run(tmp_path / "1", "close", blocks=[10.2] * 8)
    write_run(tmp_path / "2", "wide", blocks=[9.0, 11.6] * 4)
    found = said(tmp_path)["Faster?"]
    assert found.startswith("close bf16 takes 1.02 times as long as amp bf16")
    assert found.endswith("which one is faster cannot be told.")


def test_none_of_several_baselines_is_the_best(tmp_path):
    for place, precision in enumerate(("fp32", "bf16")):
        write_run(tmp_path / f"{place}0", "amp", precision)
        write_run(tmp_path / f"{place}1", "mine", precision, step_ms=20.0, peak_memory_bytes=3_000_000)
    found = said(tmp_path)
    assert found["Faster?"].startswith("mine fp32 takes 2.00 times as long as amp fp32")
    assert found["Smaller?"].startswith("mine fp32 needs 3 MB, 1.50 times the 2 MB of amp fp32")


def test_times_of_other_races_are_in_doubt_and_times_of_a_wrong_run_too(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", step_ms=5.0, race="another")
    found = said(tmp_path, {"1": Verdict(Word.DIFFERS, "loss", "it is", "0")})
    assert "and does not compute the same." in found["Faster?"]
    assert found["Smaller?"].endswith(", and does not compute the same.")
    assert "mine bf16 took no turns with the baseline: drift of the machine counts." in found["Faster?"]
    declared = said(tmp_path, {"1": Verdict(Word.DIFFERS_AS_DECLARED, "moments in bf16", reference="0")})
    assert declared["Smaller?"].endswith("as much as amp bf16, and differs as declared.")


def test_nothing_finished(tmp_path):
    write_run(tmp_path / "0", "amp", status="failed", losses=())
    assert said(tmp_path) == {"Right?": "No run finished."}


def test_the_baseline_is_said_where_it_is_the_best(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", step_ms=20.0, peak_memory_bytes=3_000_000)
    found = said(tmp_path)
    assert found["Faster?"].startswith("amp bf16 is the fastest. mine bf16 takes 2.00 times as long as amp bf16")
    assert found["Smaller?"].startswith("amp bf16 needs the least. mine bf16 needs 3 MB, 1.50 times the 2 MB of amp")
    write_run(tmp_path / "2", "other", step_ms=5.0, peak_memory_bytes=1_000_000)
    found = said(tmp_path)
    assert "the fastest" not in found["Faster?"]
    assert "the least" not in found["Smaller?"]


@pytest.mark.parametrize("step_ms", [0.03, 1.234, 987.6])
def test_numbers_are_as_in_the_table(tmp_path, step_ms):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", step_ms=step_ms, blocks=[step_ms] * 8, peak_memory_bytes=1_234_567)
    contents = Report(compare(find_runs([tmp_path]), "amp"), "amp")
    data.summary_csv(contents, tmp_path)
    row = pd.read_csv(tmp_path / "summary.csv").iloc[1]
    found = said(tmp_path)
    ratio = float(found["Faster?"].split(" takes ")[1].split()[0])
    assert math.isclose(ratio, row["time_vs_baseline"], rel_tol=0.05 if step_ms < 1 else 5e-3, abs_tol=5e-3)
    peak = f"{row['peak_memory_bytes'] / 1e6:.4g}"
    assert f"needs {peak} MB, {row['peak_memory_vs_baseline']:.2f} times" in found["Smaller?"]


def test_a_reason_is_cut_after_its_first_clause():
    assert first_clause("the output of a is off, beyond what roundings make: what b passes") == (
        "the output of a is off, beyond what roundings make."
    )
    assert (
        first_clause("a.weight, b.weight and 17 more have no gradient")
        == "a.weight, b.weight and 17 more have no gradient."
    )
    assert first_clause(" ".join("x" * 40)).endswith(" ...")
