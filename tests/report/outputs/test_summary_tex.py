"""The file ``summary.tex``."""

from support.records import write_run

from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.outputs import summary_tex
from mpcompare.report.runs import find_runs
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word


def lines(folder):
    return summary_tex.lines(Report(compare(find_runs([folder]), "amp"), "amp"))


def test_the_table_is_a_tabular_with_the_rules_of_booktabs(tmp_path):
    write_run(tmp_path / "0", "mine_%", step_ms=5.0)
    write_run(tmp_path / "1", "amp")
    write_run(tmp_path / "2", "gone", status="failed", losses=())
    assert lines(tmp_path)[1:] == [
        "% t, batch 8, seed 0, cpu",
        r"\begin{tabular}{lllrrrrrr}",
        r"\toprule",
        r"backend & precision & verdict & ms/step p50 & time / amp bf16 & peak MB & memory / amp bf16 & final loss "
        r"& test acc. \\",
        r"\midrule",
        r"mine\_\% & bf16 &  & 5 & 0.50 (0.50{-}0.50) & 2 & 1.00 & 1.00000 & 0.5000 \\",
        r"amp & bf16 &  & 10 & 1 & 2 & 1 & 1.00000 & 0.5000 \\",
        r"gone & bf16 & failed &  &  &  &  &  &  \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_comparisons_stand_below_their_titles(tmp_path):
    for batch in (8, 16):
        write_run(tmp_path / str(batch), "amp", batch_size=batch, sweep="s")
    titles = [line for line in lines(tmp_path) if "multicolumn" in line]
    assert titles == [rf"\multicolumn{{9}}{{l}}{{t, batch {batch}, seed 0, cpu}} \\" for batch in (8, 16)]


def test_a_verdict_has_no_sign_that_fonts_of_latex_lack(tmp_path):
    write_run(tmp_path / "0", "amp")
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    contents = Report([comparison.judged({"0": Verdict(Word.REFERENCE, reference="0")})], "amp")
    (row,) = (line for line in summary_tex.lines(contents) if line.startswith("amp & "))
    assert row.startswith("amp & bf16 & reference & ")


def test_text_of_others_is_no_latex():
    escaped = summary_tex.escape(r"\input{x} 5% a_b ~ ^ # $1 & -- < |")
    assert escaped == (
        r"\textbackslash{}input\{x\} 5\% a\_b \textasciitilde{} \textasciicircum{} \# \$1 \& {-}{-} "
        r"\textless{} \textbar{}"
    )


def test_a_title_of_several_lines_stays_a_comment(tmp_path):
    write_run(tmp_path / "0", "amp", task="t\n\\input{x}")
    assert lines(tmp_path)[1] == r"% t \input{x}, batch 8, seed 0, cpu"
