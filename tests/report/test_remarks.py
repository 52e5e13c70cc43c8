"""Lines beneath the table."""

import math

import pandas as pd
import pytest
from support.records import MEASURED, write_run

from mpcompare.report import remarks
from mpcompare.report.comparison import compare
from mpcompare.report.report import report
from mpcompare.report.runs import find_runs
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word

pytestmark = pytest.mark.usefixtures("undrawn")


def test_what_could_not_be_checked_is_said_once_for_those_that_are_the_same(tmp_path):
    for i, backend in enumerate(("amp", "scratch", "fused", "wrong")):
        write_run(tmp_path / str(i), backend)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    unchecked = ["ReLU (examined as GELU)", "training (no noise was measured)"]
    verdicts = {
        "0": Verdict(Word.REFERENCE),
        "1": Verdict(Word.SAME, unchecked=unchecked), "2": Verdict(Word.SAME, unchecked=unchecked),
        "3": Verdict(Word.DIFFERS, unchecked=unchecked),
    }  # fmt: skip
    assert remarks.unchecked(comparison.judged(verdicts)) == [
        "scratch bf16, fused bf16: not checked: ReLU (examined as GELU), training (no noise was measured)"
    ]


@pytest.mark.slow
def test_memory_that_is_not_what_the_model_says_is_named(tmp_path, capsys):
    write_run(tmp_path / "0", "above", peak_memory_bytes_analytic=1_900_000, **MEASURED)
    write_run(tmp_path / "1", "close", peak_memory_bytes_analytic=1_910_000, **MEASURED)
    write_run(tmp_path / "2", "below", peak_memory_bytes_analytic=4_000_000)
    write_run(tmp_path / "3", "unknown", peak_memory_bytes_analytic=None, memory_model={})
    assert report([tmp_path], tmp_path / "report", "above", formats=[])
    out = capsys.readouterr().out
    for cell in ("vs model\n", " +5.3 %\n", " +4.7 %\n", " -50.0 %\n", " -\n"):  # the last column
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


@pytest.mark.slow
def test_who_computes_in_the_turns_of_others_is_named_and_other_programs_are_not_blamed_for_it(tmp_path, capsys):
    write_run(tmp_path / "0", "busy", out_of_turn=1.5, other_cores=0.1)
    write_run(tmp_path / "1", "amp", out_of_turn=0.0015, other_cores=1.6)
    write_run(tmp_path / "2", "later", out_of_turn=1.0, other_cores=1.6, race=None)
    report([tmp_path], tmp_path / "report", formats=[])
    out = capsys.readouterr().out
    assert "busy bf16: kept 1.5 cores busy in the turns of others" in out
    assert out.count("in the turns of others") == 1
    assert "later bf16: other programs kept 1.6 cores busy meanwhile" in out
    assert out.count("other programs") == 1


def test_who_computes_little_in_the_many_turns_of_others_is_named_by_the_part_of_its_block(tmp_path):
    write_run(tmp_path / "0", "ahead", out_of_turn=0.01, waited_s=1.0, step_ms=250)
    write_run(tmp_path / "1", "amp", out_of_turn=0.004, waited_s=1.0, step_ms=250)
    lines = remarks.timing(*compare(find_runs([tmp_path]), "amp"))
    assert [line for line in lines if "in the turns of others" in line] == [
        "ahead bf16: kept 0.01 cores busy in the turns of others (OpenMP does with OMP_WAIT_POLICY=active)"
    ]


def test_waits_count_by_their_length_and_the_first_one_not(tmp_path):
    write_run(tmp_path / "0", "amp")
    path = tmp_path / "0" / "blocks.csv"
    blocks = pd.read_csv(path)
    blocks.loc[0, ["cores_between_turns", "s_between_turns", "cpu_s_between_turns"]] = [0.5, 2.0, 1.0]
    blocks.loc[1, ["cores_between_turns", "s_between_turns", "cpu_s_between_turns"]] = [0.9, 0.001, 0.0009]
    blocks.to_csv(path, index=False)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert not [line for line in remarks.timing(comparison) if "in the turns of others" in line]
    blocks.loc[2::3, "cpu_s_between_turns"] = 0.02  # in every third wait it computes for a fifth of it
    blocks.to_csv(path, index=False)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [line for line in remarks.timing(comparison) if "in the turns of others" in line]


def test_phases_that_do_not_add_up_to_a_step_are_named(tmp_path):
    """The blocks vary by 1 %, so one more is within 5 % and the place of its memory."""
    blocks = [10.0 + 0.1 * math.sin(number) for number in range(10)]
    for place, (backend, more) in enumerate(
        {
            "right": {"phase_sum_ms": 10.4},
            "late": {"phase_sum_ms": 5.0},
            "less": {"phase_sum_ms": 11.3},
            "clocked": {"phase_sum_ms": 11.3, "phase_overhead": 0.15},
            "disturbed": {"phase_sum_ms": 11.3, "other_cores": 0.5},
            "varying": {"phase_sum_ms": 11.3, "blocks": [8.0, 12.0] * 5},
            "once": {"phase_sum_ms": 50.0, "blocks": [10.0]},
            "of before": {},
        }.items()
    ):
        write_run(tmp_path / str(place), backend, **{"blocks": blocks, "race": backend, **more})
    (comparison,) = compare(find_runs([tmp_path]), "right")
    step = "a step in a block 10 ms: one of the two is not right"
    assert [line for line in remarks.timing(comparison) if "phases" in line] == [
        f"late bf16: the phases of a step take 5 ms together, and {step}",
        f"less bf16: the phases of a step take 11.3 ms together, and {step}",
    ]


def test_a_block_that_goes_on_after_its_last_step_is_named_where_nothing_is_queued(tmp_path):
    write_run(tmp_path / "0", "late", read_ms=4.0, device="cpu")
    write_run(tmp_path / "1", "amp", read_ms=0.1, device="cpu")
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    why = "its steps return before they are finished, or its weights are copied"
    assert [line for line in remarks.timing(comparison) if "reading" in line] == [
        f"late bf16: reading loss and weights took 40 % of a block, which is in its time: {why}"
    ]


def test_reading_that_takes_as_long_for_all_is_not_named(tmp_path):
    for place, (backend, more) in enumerate(
        {
            "one": {"read_ms": 4.5},
            "amp": {"read_ms": 4.0},
            "other": {"read_ms": 3.6},
            "disturbed": {"read_ms": 4.0, "race": None, "other_cores": 1.0},
            "alone": {"read_ms": 4.0, "race": None},
        }.items()
    ):
        write_run(tmp_path / str(place), backend, device="cpu", **more)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    named = [line.partition(":")[0] for line in remarks.timing(comparison) if "reading" in line]
    assert named == ["alone bf16"]


def test_products_of_fp32_numbers_in_another_precision_are_named(tmp_path):
    flags = {"fp32_precision mkldnn.matmul": "bf16", "fp32_precision cuda.matmul": "ieee", "tf32": False}
    write_run(tmp_path / "0", "mine", flags=flags)
    write_run(
        tmp_path / "1",
        "tf32",
        "tf32",
        flags={"fp32_precision cuda.matmul": "tf32", "fp32_precision mkldnn.rnn": "none"},
    )
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [line for line in remarks.timing(comparison) if "fp32 numbers" in line] == [
        "mine bf16: the backend lets torch compute products of fp32 numbers otherwise (mkldnn.matmul in bf16)"
    ]


@pytest.mark.parametrize(("half_width", "named"), [(0.005, True), (0.02, False)])
def test_cores_that_move_no_ratio_beyond_its_interval_are_not_named(tmp_path, half_width, named):
    """0.024 of 2 cores are 1.2 % of the machine, and in a wait of half a block 1.2 % of that block."""
    timing = {"rounds": 10, "stopped": "rel_ci", "half_width": half_width, "seconds": 1.0, "race": "r", "compared": 1}
    write_run(tmp_path / "0", "spins", out_of_turn=0.024, waited_s=0.005, timing=timing)
    write_run(tmp_path / "1", "amp", timing=timing)
    lines = remarks.timing(*compare(find_runs([tmp_path]), "amp"))
    assert any("in the turns of others" in line for line in lines) is named


def test_a_remark_on_several_runs_is_one_line(tmp_path):
    for place in range(3):
        write_run(tmp_path / str(place), f"b{place}", other_cores=1.0)
    lines = remarks.timing(*compare(find_runs([tmp_path]), "b0"))
    assert lines[0] == "b0 bf16, b1 bf16, b2 bf16: other programs kept 1.0 cores busy meanwhile"
    assert lines[-1].startswith("10 rounds of blocks")
