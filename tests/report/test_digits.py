"""The map of lost digits: the maps of a comparison, their lines, the file and the figure."""

import csv
from dataclasses import dataclass, field

import pytest
from support.records import result_of

from mpcompare.fields import Result
from mpcompare.report import digits
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.contents import Report
from mpcompare.report.figures.digits import MOST, worst_rows
from mpcompare.report.figures.digits import digits as digits_figure
from mpcompare.report.outputs import data
from mpcompare.verdict.findings import Findings, Recipe
from mpcompare.verdict.judge.drive import Drive, Gradients
from mpcompare.verdict.judge.replayed import Digits, Layers
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word

RIGHT = Digits("Linear", output=0.001, gradient=0.002, terms=1.0, gradient_terms=1.0)
CANCELS = Digits("Minus", output=0.125, gradient=0.001, terms=50.0, gradient_terms=1.0)
SQUARES = Digits("Norm", output=0.0001, gradient=0.0001, operator="square", largest=4e5)


@dataclass
class Recorded:
    name: str
    result: Result
    findings: Findings
    steps: None = None
    start: dict = field(default_factory=dict)


def entry(backend, precision, computes="fp32", **steps):
    places = {place for found in steps.values() for place in found}
    layers = {place: {"kind": "any", "computes": computes} for place in places}
    config = {"task": {"model": {"_target_": "my_package.Net"}}}
    result = result_of(backend=backend, precision=precision, config=config, module_dtypes=layers)
    replays = {step: Layers(1.0, 1.0, 0.0, digits=found) for step, found in steps.items()}
    none = Drive()
    found = Findings(precision, Recipe(8), 1, {}, none, Gradients(1.0, 1.0, 0.0), replays=replays)
    return Entry(Recorded(f"{backend}-{precision}", result, found), f"{backend} {precision}", "", None)


def compared(*entries):
    comparison = Comparison("title", "data", entries=list(entries))
    references = {e.run.result.precision: e.run.name for e in reversed(entries)}
    verdicts = {e.run.name: Verdict(Word.SAME, reference=references[e.run.result.precision]) for e in entries}
    return comparison.judged(verdicts)


def test_a_line_names_the_layer_that_loses_the_most_digits_and_the_dtype_of_the_reference():
    found = {"first": RIGHT, "minus": CANCELS}
    comparison = compared(
        entry("amp", "bf16", "bf16", first=found, last=found), entry("other", "bf16", last={"minus": RIGHT})
    )
    (line,) = digits.lines(comparison)
    assert line == (
        "Rounding to bf16 matters most in Minus minus, after training: one rounding is 12 % of its output, for it "
        "sums what is 50 times as large; amp bf16 computes it in bf16. 1 of the 2 places that were seen should stay "
        "in fp32."
    )


def test_a_line_says_overflow_first():
    (line,) = digits.lines(compared(entry("amp", "fp16", first={"minus": CANCELS, "norm": SQUARES})))
    assert line == (
        "Numbers go beyond fp16 in Norm norm, in the first step: squares above 65504; amp fp16 computes it in fp32. "
        "2 of the 2 places that were seen should stay in fp32."
    )


def test_a_line_says_that_no_layer_needs_fp32():
    (line,) = digits.lines(compared(entry("amp", "bf16", last={"a": RIGHT, "before (output)": RIGHT})))
    assert line.endswith(" by 0.2 %. None of the 2 places that were seen loses half of its digits or overflows.")


def test_a_line_says_that_nothing_is_known():
    lines = digits.lines(compared(entry("fp32", "fp32", first={}), entry("scratch", "fp16", first={})))
    assert lines == ["the digits that fp16 loses are not known: no run shows its layers"]


def test_another_run_stands_for_a_reference_that_shows_no_layers():
    comparison = compared(entry("amp", "bf16"), entry("other", "bf16", first={"a": RIGHT}))
    (shown,) = digits.shown(comparison)
    assert (shown.entry.label, shown.reference.label) == ("other bf16", "amp bf16")


def test_the_file_has_a_row_for_each_place_run_and_step(tmp_path):
    found = {"first": RIGHT, "minus": CANCELS}
    comparison = compared(entry("amp", "bf16", first=found, last=found), entry("other", "bf16", last=found))
    data.digits_csv(Report([comparison], "amp"), tmp_path)
    rows = list(csv.DictReader((tmp_path / "digits.csv").open()))
    assert [(row["label"], row["step"], row["layer"]) for row in rows] == [
        (label, step, layer)
        for label, step in (("amp bf16", "last"), ("amp bf16", "first"), ("other bf16", "last"))
        for layer in ("first", "minus")
    ]
    minus = rows[1]
    assert float(minus["output_lost"]) == 5  # 2^-3 is 2^5 roundings of 2^-8
    assert float(minus["gradient_lost"]) == 0
    assert minus["advice"] == "keep in fp32, with what it is given"
    assert rows[0]["advice"] == ""


def test_the_figure_marks_each_place_and_explains_those_that_need_fp32():
    found = {"first": RIGHT, "minus": CANCELS, "last": RIGHT}
    comparison = compared(entry("amp", "bf16", last=found))
    figure = digits_figure(Report([comparison], "amp"))
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["first (Linear)", "minus (Minus)", "last (Linear)"]
    marks = {
        dots.get_label(): dots.get_offsets()[:, 0].tolist() for dots in axes.collections if len(dots.get_offsets()) == 3
    }
    assert marks == {"its output": [0.001, 0.125, 0.001], "its gradient": [0.002, 0.001, 0.002]}
    (text,) = [text.get_text() for text in axes.texts]
    assert text.strip().startswith("one rounding is 12 % of its output")
    assert [tick.get_fontweight() for tick in axes.get_yticklabels()] == ["normal", "bold", "normal"]


def test_the_figure_of_200_layers_shows_the_worst_and_says_how_many_are_left_out():
    found = {f"{n}": Digits("Linear", output=1e-3 + n * 1e-5) for n in range(198)}
    found = {"minus": CANCELS, **found, "norm": Digits("Linear")}
    comparison = compared(entry("amp", "bf16", last=found))
    figure = digits_figure(Report([comparison], "amp"))
    (each,) = digits.shown(comparison)
    rows = [row.place for row in worst_rows(each)]
    assert rows == ["minus", *(f"{n}" for n in range(198 - MOST + 1, 198))]
    assert "160 others are left out" in figure.axes[0].get_title(loc="left")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_figure_where_no_layer_is_shown(precision):
    comparison = compared(entry("amp", precision, first={}))
    assert digits_figure(Report([comparison], "amp")) is None
