"""The file ``summary.md``."""

import pytest
from markdown_it import MarkdownIt
from support.records import write_run

from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.outputs import summary_md
from mpcompare.report.report import report
from mpcompare.report.runs import find_runs
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word

HOSTILE = "<script>alert('x')</script> | **b** _i_ `c` [a](http://b) ![i](x) &lt; \\ $m$\n# head @somebody"


def shown(folder, verdicts=None):
    """Returns the lines of the file, and the tokens of its Markdown."""
    comparisons = [comparison.judged(verdicts or {}) for comparison in compare(find_runs([folder]), "amp")]
    lines = summary_md.lines(Report(comparisons, "amp"))
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse("\n".join(lines))
    return lines, [each for token in tokens for each in (token, *(token.children or []))]


def test_the_file_has_verdicts_in_words_a_table_and_what_was_measured(tmp_path):
    for place, backend in enumerate(("mine", "amp", "bad", "other")):
        write_run(tmp_path / str(place), backend, step_ms=5.0 if place else 10.0)
    write_run(tmp_path / "4", "gone", status="failed", losses=())
    verdicts = {
        "0": Verdict(Word.SAME, reference="1", unchecked=["ReLU (examined as GELU)"]),
        "1": Verdict(Word.REFERENCE, reference="1"),
        "2": Verdict(Word.DIFFERS, "no loss scaling", "most gradients are 0", "1"),
    }
    lines, _ = shown(tmp_path, verdicts)
    assert lines == [
        "### mpcompare: t, batch 8, seed 0, cpu",
        "",
        "- **Right?** `bad bf16` does not compute the same as `amp bf16` (no loss scaling): most gradients are 0. "
        "`mine bf16` computes the same as `amp bf16` (0 checks). `gone bf16` did not finish.",
        "- **Faster?** `mine bf16` takes 2.00 times as long as `amp bf16` (2.00 to 2.00). `bad bf16` and `other bf16` "
        "take 1.00 to 1.00 times as long as `amp bf16`: whether they are faster cannot be told.",
        "- **Smaller?** `mine bf16` needs 2 MB, as much as `amp bf16`. `bad bf16` needs 2 MB, as much as "
        "`amp bf16`, and does not compute the same. `other bf16` needs 2 MB, as much as `amp bf16`.",
        "",
        "| backend | precision | verdict | ms/step p50 | time / amp bf16 | peak MB | memory / amp bf16 | final loss "
        "| test acc. |",
        "|---|---|---|---|---|---|---|---|---|",
        "| mine | bf16 | ✓ same | 10 | 2.00 (2.00-2.00) | 2 | 1.00 | 1.00000 | 0.5000 |",
        "| amp | bf16 | = reference | 5 | 1 | 2 | 1 | 1.00000 | 0.5000 |",
        "| bad | bf16 | ✗ differs: no loss scaling | 5 | 1.00 (1.00-1.00) | 2 | 1.00 | 1.00000 | 0.5000 |",
        "| other | bf16 |  | 5 | 1.00 (1.00-1.00) | 2 | 1.00 | 1.00000 | 0.5000 |",
        "| gone | bf16 | failed |  |  |  |  |  |  |",
        "",
        "- **Differs: no loss scaling**: `bad bf16`, compared with `amp bf16`: most gradients are 0",
        "- **failed**: `gone bf16`: precision=fp16: no",
        "- **Same**: `mine bf16`, compared with `amp bf16`; not checked: ReLU (examined as GELU)",
        "- **Reference**: `amp bf16`; others are compared with it",
        "- **Not examined**: `other bf16`",
        "",
        "- Measured on device cpu, threads 2, torch 2.15.0; data: synthetic (asked for)",
        "- 10 rounds of blocks, stopped because narrow enough: every ratio of two runs is known within 0.0 % (95 %)",
    ]


def test_a_difference_as_declared_and_the_detail_of_a_cause_are_in_the_words(tmp_path):
    for place, backend in enumerate(("plain", "amp", "silent")):
        write_run(tmp_path / str(place), backend)
    detail = "asked for fp16, computes in fp32"
    verdicts = {
        "0": Verdict(Word.DIFFERS_AS_DECLARED, "no master weights", reference="1", unchecked=["training"]),
        "2": Verdict(Word.DIFFERS, "precision", "all compute in fp32", "1", detail=detail),
    }
    lines, _ = shown(tmp_path, verdicts)
    assert [line for line in lines if line.startswith("- **Differs")] == [
        "- **Differs: precision (asked for fp16, computes in fp32)**: `silent bf16`, compared with `amp bf16`: all "
        "compute in fp32",
        "- **Differs as declared: no master weights**: `plain bf16`, compared with `amp bf16`; not checked: training",
    ]


def test_a_reason_is_kept_whole(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine")
    reason = " ".join(f"word{number}" for number in range(100))
    lines, _ = shown(tmp_path, {"1": Verdict(Word.DIFFERS, "loss", reason, "0")})
    assert any(line.endswith(reason) for line in lines)


def test_no_folder_of_a_machine_is_told(tmp_path):
    reason = "found in /home/somebody/data/mnist"
    write_run(
        tmp_path / "0", "amp", dataset_reason=reason, environment={"LD_PRELOAD": "/usr/lib/x86_64/libjemalloc.so"}
    )
    lines, _ = shown(tmp_path)
    assert any(line.endswith("; data: synthetic (found in mnist)") for line in lines)
    assert any("LD\\_PRELOAD=libjemalloc.so" in line or "LD_PRELOAD=libjemalloc.so" in line for line in lines)
    assert "/home" not in "".join(lines)
    assert summary_md.escape("time / amp, 1/2 of https://a.b/c/d") == "time / amp, 1/2 of https://a.b/c/d"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_every_report_has_the_file(tmp_path):
    write_run(tmp_path / "0", "amp")
    report([tmp_path], tmp_path / "report", "amp", formats=[])
    assert (tmp_path / "report" / "summary.md").read_text().startswith("### mpcompare: t, batch 8")


def test_text_of_others_is_shown_as_it_is(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", HOSTILE, dataset_reason=HOSTILE, task=HOSTILE)
    write_run(tmp_path / "2", "mine", task=HOSTILE)
    write_run(tmp_path / "3", "gone", options={"path": HOSTILE}, status="failed", losses=())
    lines, tokens = shown(tmp_path, {"1": Verdict(Word.DIFFERS, HOSTILE, HOSTILE, "2")})
    kinds = {token.type for token in tokens}
    assert not kinds & {"html_block", "html_inline", "link_open", "image", "em_open", "s_open", "fence"}
    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h3"]
    texts = " ".join(token.content for token in tokens if token.type == "text")
    assert "<script>alert('x')</script> | **b** _i_ `c` [a](http://b) ![i](x) &lt; \\ $m$ # head @" in texts
    assert "@somebody" not in texts  # nobody is sent a message
    table = [line for line in lines if line.startswith("|")]
    assert sum(token.type == "tr_open" for token in tokens) == len(table) - 1  # less the rule


def test_many_runs_and_comparisons_take_at_most_40_lines(tmp_path):
    for batch in range(1, 7):
        for place in range(8):
            write_run(tmp_path / f"{batch}-{place}", "amp" if not place else f"b{place}", batch_size=batch, sweep="s")
    names = [f"{batch}-{place}" for batch in range(1, 7) for place in range(1, 8)]
    lines, tokens = shown(tmp_path, {name: Verdict(Word.DIFFERS, "loss", f"why {name}") for name in names})
    assert len(lines) == summary_md.LINES
    assert lines[0] == "### mpcompare: 6 comparisons"
    assert lines[2].startswith("- (1) **Right?** `b1 bf16` does not compute the same as `the others` (loss): why 1-1. ")
    assert any(line.startswith("- (1) **Differs: loss**: `b1 bf16`: why 1-1") for line in lines)
    assert "- and 37 more: verdict.json" in lines
    rows = [line for line in lines if line.startswith("|")]
    assert rows[0].startswith("| comparison | backend |")
    assert rows[2].startswith("| (1) t, batch 1, seed 0, cpu | amp |")
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1
    assert rows[-1].startswith(f"| and {48 - (len(rows) - 3)} more: summary.csv |")
    assert sum(token.type == "table_open" for token in tokens) == 1


def test_runs_that_differ_because_that_was_allowed_are_said(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", lr=0.5)
    lines = summary_md.lines(Report(compare(find_runs([tmp_path]), "amp", ["task"]), "amp"))
    assert "- **NOT THE SAME: task.optimizer.lr (report.allow)**" in lines
