import copy
import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch
from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.contents import Report
from mpcompare.report.figures import exponents as exponent_figures
from mpcompare.report.figures import histograms
from mpcompare.report.figures.exponents import ROUNDOFF, lost_updates, update_ratio
from mpcompare.report.figures.gradient_error import gradient_error
from mpcompare.report.figures.judged import judged
from mpcompare.report.figures.loss import noise
from mpcompare.report.figures.registry import FIGURES
from mpcompare.report.verdicts import judge_all
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.findings import HIGHEST, LOWEST
from mpcompare.verdict.judge.drive import Step
from mpcompare.verdict.judge.errors import Layer

NAMES = ("gradient_error", "noise", "exponents", "update_ratio")


@pytest.fixture(scope="module")
def records():
    """Returns a reference for each precision, and a copy of it as the run to compare."""
    task = make_task()
    found = {}
    for precision in ("fp16", "bf16"):
        reference = examined(f"amp-{precision}", Amp, task, dataset_of(task), precision, steps=6, noise=2)
        other = replace(copy.deepcopy(reference), name=f"other-{precision}")
        other = replace(other, findings=replace(other.findings, noise=[], exponents={}))
        found.update({reference.name: reference, other.name: other})
    return found


@pytest.fixture
def runs(records):
    return copy.deepcopy(records)


def reported(runs):
    """Returns the report on the runs, in one comparison; the fp16 runs and the bf16 runs lie mixed."""
    order = sorted(runs.values(), key=lambda run: run.name.split("-")[0])
    comparison = Comparison(
        "title", "data", entries=[Entry(run, run.name.replace("-", " "), "", None) for run in order]
    )
    return Report([comparison.judged(judge_all(comparison))], "amp")


def with_errors(run, **changes):
    """Returns a run with other errors of the first step's gradients: attributes by tensor, None for a missing one."""
    errors = dict(run.findings.replays["first"].gradients)
    for tensor, change in changes.items():
        name = tensor.replace("_", ".")
        errors[name] = None if change is None else replace(errors[name], **change)
    return with_gradients(run, errors)


def with_gradients(run, gradients):
    """Returns a run whose forced replay of the first step has these errors of gradients."""
    first = replace(run.findings.replays["first"], gradients=gradients)
    return replace(run, findings=replace(run.findings, replays={"first": first}))


def with_first(run, **changes):
    return replace(run, findings=replace(run.findings, first=replace(run.findings.first, **changes)))


def histogram(**counts):
    """Returns counts by exponent; ``e_3=2`` is two values in [2^-3, 2^-2), and ``zero`` counts the zeros."""
    found = [counts.pop("zero", 0)] + [0] * (HIGHEST - LOWEST + 1)
    for name, count in counts.items():
        found[1 - int(name.removeprefix("e_")) - LOWEST] = count
    return found


def test_dots_and_limits_are_as_in_the_records(runs):
    other = runs["other-fp16"]
    error = other.findings.replays["first"].gradients["layer2.weight"].error
    runs["other-fp16"] = with_errors(other, layer2_weight={"error": 8 * error})
    report = reported(runs)
    verdicts = report.verdicts
    assert verdicts["other-fp16"].word == "differs"
    figure = gradient_error(report)
    tensors = [f"layer{n}.{part}" for n in (1, 2, 3) for part in ("weight", "bias")]
    assert rows_of(figure) == tensors
    errors, ratios = figure.axes
    named = [dots.get_label().removesuffix(" (reference)").replace(" ", "-") for dots in errors.collections]
    assert named == ["amp-fp16", "other-fp16", "amp-bf16", "other-bf16"]
    for name, dots, beside in zip(named, errors.collections, ratios.collections, strict=True):
        gradients = runs[name].findings.replays["first"].gradients
        found = dots.get_offsets()[:, 0]
        assert np.allclose(found, [gradients[t].error / gradients[t].norm for t in tensors])
        limits = {c.name: c.limit for c in verdicts[name.replace("amp", "other")].checks}
        expected = [gradients[t].error / limits[f"gradient in the first step, {t}"] for t in tensors]
        assert np.allclose(beside.get_offsets()[:, 0], expected)
    beyond = dict(zip(named, ratios.collections, strict=True))["other-fp16"].get_offsets()[:, 0] > 1
    assert beyond.tolist() == [name == "layer2.weight" for name in tensors]


def test_a_gradient_that_is_0_is_not_drawn(runs):
    """The exact gradient of a bias before a norm is float64's rounding errors: any error is larger than them."""
    runs = {name: with_errors(run, layer1_bias={"norm": 1e-17, "error": 1e-5}) for name, run in runs.items()}
    report = reported(runs)
    figure = gradient_error(report)
    assert "layer1.bias" not in rows_of(figure)
    assert "not drawn, exactly 0 (1): layer1.bias" in figure.subfigs[0].legends[0].get_title().get_text()
    assert figure.axes[0].get_xlim()[1] < 1


def test_gradients_that_are_missing_or_no_numbers_are_marked(runs):
    runs["other-fp16"] = with_errors(
        runs["other-fp16"], layer1_weight=None, layer1_bias={"error": math.nan},
        layer2_weight={"error": math.inf, "norm": math.inf},
    )  # fmt: skip
    other = runs["other-bf16"]
    without = with_first(other, finite=replace(other.findings.first.finite, gradients={}))
    runs["other-bf16"] = replace(without, findings=replace(without.findings, replays={}))
    runs["gone-fp16"] = replace(runs["other-fp16"], name="gone-fp16", findings=None)
    report = reported(runs)
    figure = gradient_error(report)
    marked = [y for line in figure.axes[0].lines for y in line.get_ydata()]
    assert np.round(marked).tolist() == [0, 1, 2]
    legend = [text.get_text() for text in figure.subfigs[0].legends[0].get_texts()]
    assert "other bf16: shows none" in legend
    assert "gone fp16: not examined" in legend


def test_long_names_of_runs_stand_below_each_other(runs):
    name = f"{'long_name_' * 5}fp16"
    runs[name] = replace(runs.pop("other-fp16"), name=name)
    figure = gradient_error(reported({each.name: each for each in (runs["amp-fp16"], runs[name])}))
    figure.draw_without_rendering()
    first, second = (text.get_window_extent() for text in figure.subfigs[0].legends[0].get_texts())
    assert first.y0 > second.y1
    assert second.x1 < figure.bbox.x1


def large(runs, names):
    """Gives the runs a network with these tensors, of equal errors, in the layers of a class each."""
    first = runs["amp-fp16"].findings.first
    error = first.gradients["layer2.weight"]
    kinds = {name: Layer(name.rpartition(".")[0], kind, [], "weight", place=0) for name, kind in names.items()}
    for name, run in runs.items():
        run = with_first(run, finite=replace(run.findings.first.finite, gradients=dict.fromkeys(names, error)))
        runs[name] = replace(run, findings=replace(run.findings, layers=kinds, replays={}))
    return runs


def rows_of(figure):
    return [tick.get_text() for tick in figure.axes[0].get_yticklabels()]


def test_a_large_network_has_a_row_for_each_tensor_where_a_page_holds_them(runs):
    names = dict.fromkeys([f"blocks.{place}.weight" for place in range(30)], "Linear")
    report = reported(large(runs, names))
    figure = gradient_error(report)
    assert rows_of(figure) == list(names)
    errors, ratios = figure.axes
    amp, other, *_ = errors.collections
    relative = runs["amp-fp16"].findings.first.gradients["blocks.0.weight"].relative
    assert np.allclose(amp.get_offsets()[:, 0], relative)
    assert np.array_equal(np.asarray(amp.get_offsets()[:, 1]).round(), np.arange(30))
    assert (amp.get_offsets()[:, 1] < other.get_offsets()[:, 1]).all()  # a lane for each run
    limits = {check.name: check.limit for check in report.verdicts["other-fp16"].checks}
    limit = limits["gradient in the first step, blocks.0.weight"]
    error = runs["other-fp16"].findings.first.gradients["blocks.0.weight"].error
    assert ratios.collections[1].get_offsets()[0, 0] == pytest.approx(error / limit)
    assert "holds n tensors" not in figure.subfigs[0].legends[0].get_title().get_text()


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        ("blocks.{}.weight", ["blocks.0..198.weight (100)", "blocks.1..199.weight (100)"]),
        pytest.param("conv{}.weight", ["conv0..198.weight (100)", "conv1..199.weight (100)"], marks=pytest.mark.slow),
        ("{0:08b}", ["Linear weight (100)", "Conv2d weight (100)"]),
    ],
)
def test_200_tensors_stand_together_by_layer_on_one_page(runs, pattern, rows):
    words = str.maketrans("01", "ab") if "b" in pattern[-3:] else {}
    names = {pattern.format(n).translate(words): ("Linear", "Conv2d")[n % 2] for n in range(200)}
    runs = large(runs, names)
    bad = list(names)[4]
    other = runs["other-fp16"]
    gradients = other.findings.first.finite.gradients
    error = gradients[bad]
    changed = {**gradients, bad: replace(error, error=1e3 * error.error), list(names)[1]: None}
    runs["other-fp16"] = with_first(other, finite=replace(other.findings.first.finite, gradients=changed))
    report = reported(runs)
    figure = gradient_error(report)
    figure.draw_without_rendering()
    assert rows_of(figure) == rows
    assert figure.get_figheight() < 11.7
    assert figure.get_figwidth() < 16
    assert "a row with (n) holds n tensors" in figure.subfigs[0].legends[0].get_title().get_text()
    assert figure.axes[1].texts[0].get_text().split()[1] == bad
    assert figure.axes[1].texts[1].get_text() == f"inf  {list(names)[1]}"
    for text in (*figure.axes[1].texts, *figure.subfigs[0].legends):
        assert text.get_window_extent().x1 <= figure.bbox.x1


def test_the_band_is_the_largest_difference_of_any_two(runs):
    reference, other = runs["amp-fp16"], runs["other-fp16"]
    other.steps["loss"] += [0.0, 1e-6, math.nan, 0.0, 2e-6, 1.0]
    report = reported({run.name: run for run in (reference, other)})
    (axes,) = noise(report).axes
    losses = [reference.steps["loss"], *(again.losses for again in reference.findings.noise)]
    (band,) = axes.collections
    outline = band.get_paths()[0].vertices
    for step, values in enumerate(zip(*losses, strict=True), start=1):
        largest = max(abs(a - b) for a, b in combinations(values, 2))
        left, right = (set(outline[outline[:, 0] == step + side][:, 1]) for side in (-0.5, 0.5))
        assert largest in left & right
    limit, curve, lost = axes.lines
    assert limit.get_ydata()[0] == next(
        c.limit for c in report.verdicts[other.name].checks if c.name == "loss over the run"
    )
    assert np.isnan(curve.get_ydata()).tolist() == [True, False, True, True, False, False]  # no difference: a gap
    assert lost.get_xdata().tolist() == [3]


def test_what_fp16_loses_is_what_rounding_to_fp16_loses():
    counts = histogram(zero=90, e_26=1, e_25=2, e_15=3, e_14=4)
    assert exponent_figures.lost_in_fp16(counts) == (0.1, 0.5)
    assert exponent_figures.lost_in_fp16(counts, 2.0) == (0.0, 0.3)
    assert exponent_figures.lost_in_fp16(counts, 2.0**12) == (0.0, 0.0)
    assert all(map(math.isnan, exponent_figures.lost_in_fp16(histogram(zero=3))))
    values = 2.0 ** torch.empty(20000, dtype=torch.float64).uniform_(-40, 0, generator=torch.Generator().manual_seed(0))
    for scale in (1.0, 2.0**10):
        half = (scale * values).half().double()
        expected = [(half == 0).double().mean().item(), ((half != 0) & (half < 2.0**-14)).double().mean().item()]
        assert exponent_figures.lost_in_fp16(numerics.exponents(values).tolist(), scale) == pytest.approx(
            expected, abs=1e-4
        )


def test_an_update_below_half_a_gap_is_lost():
    for precision, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        assert 2.0 ** ROUNDOFF[precision] == torch.finfo(dtype).eps / 2
    counts = histogram(zero=5, e_25=1, e_12=2, e_9=3, e_8=4)
    assert lost_updates(counts) == {"fp32": 0.1, "fp16": 0.3, "bf16": 0.6}


def test_the_limit_of_tf32_is_that_of_its_weights_in_fp32(runs):
    run = runs["amp-bf16"]
    tf32 = replace(run, name="tf32", result=replace(run.result, precision="tf32"))
    entries = [[Entry(each, each.name, "", None)] for each in (run, tf32)]
    figure = update_ratio(Report([Comparison("title", "data", entries=each) for each in entries], "amp"))
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["bf16: 2⁻⁸", "fp32: 2⁻²⁴"]


@pytest.mark.parametrize(
    ("part", "text"), [(0.0, "0"), (1e-6, "<0.1"), (0.1234, "12.3"), (0.99999, ">99.9"), (1.0, "100")]
)
def test_percentages_tell_none_from_few(part, text):
    assert histograms.percent(part) == text


def test_the_tables_say_what_is_lost_and_overlap_nothing(runs):
    weights = {f"l{n}.weight": histogram(e_26=1, e_20=1, e_5=2) for n in range(1, 6)}
    biases = {f"l{n}.bias": histogram(e_5=1) for n in range(1, 6)}
    first = {
        "activations": {"l1": histogram(zero=1, e_20=1)},
        "gradients of activations": {"a.very.long.name.of.a.layer": histogram(e_41=3, e_42=1)},
        "gradients of weights": {**biases, **weights},
        "updates": {"l1.weight": histogram(e_12=1, e_9=1, e_2=2), "l1.bias": histogram()},
    }
    parts = {name: name.split(".")[1] for name in (*weights, *biases)}
    layers = {name: Layer("l", "Linear", [], part, place=0) for name, part in parts.items()}
    amp = runs["amp-fp16"]
    runs["amp-fp16"] = replace(
        amp, findings=replace(amp.findings, exponents={"first": first, "last": first}, layers=layers)
    )
    report = reported(runs)
    figure = exponent_figures.exponents(report)
    figure.draw_without_rendering()
    panels = figure.axes[1:]
    assert [panel.get_title(loc="left") for panel in panels] == list(first)[:3]
    rows = [[text.get_text().split() for text in panel.get_legend().get_texts()] for panel in panels]
    assert rows[0] == [["l1", "0", "100"]]
    assert rows[1] == [["...name.of.a.layer", "100", "0", "25.0", "75.0"]]  # at 2^16
    assert rows[2] == [[name, "25.0", "25.0", "0", "0"] for name in weights]
    assert panels[2].get_title(loc="right") == "not drawn (5): l1.bias, l2.bias, l3.bias, ..."
    for panel in panels:
        box = panel.get_legend().get_window_extent()
        assert panel.bbox.x1 < box.x0
        assert box.x1 <= figure.bbox.x1
    shares = panels[2].patches[-1].get_data().values
    assert [shares[e - LOWEST] for e in (-26, -20, -5)] == [25, 25, 50]
    (axes,) = update_ratio(report).axes
    assert [text.get_text().split() for text in axes.get_legend().get_texts()] == [["l1.weight", "25.0", "50.0"]]


def test_names_in_a_table_are_as_long_as_it_takes_to_tell_them_apart():
    names = [f"features.{n}.block.0.0.weight" for n in (1, 2)]
    assert histograms.short([names[0], "head"]) == (20, ["...block.0.0.weight".ljust(20), "head".ljust(20)])
    assert histograms.short(names)[1] == ["...1.block.0.0.weight ", "...2.block.0.0.weight "]
    assert histograms.short([]) == (8, [])


def test_of_many_tensors_seven_are_drawn_from_first_to_last():
    names = [f"z{n}" for n in range(1, 26)]
    drawn, left_out = histograms.choose([names])
    assert drawn == ["z1", "z5", "z9", "z13", "z17", "z21", "z25"]
    assert len(left_out) == 18
    assert histograms.choose([["W1"], ["b1"]]) == (["W1", "b1"], [])


def test_the_scale_next_to_the_exponents_is_the_one_of_finite_gradients(runs):
    steps = [
        Step(finite=finite, skipped=False, should_skip=False, moved=True, loss_scale=scale, should_scale=scale)
        for finite, scale in ((False, 8.0), (True, 4.0))
    ]
    runs["amp-fp16"] = with_first(runs["amp-fp16"], steps=steps)
    (found,) = judged(reported({"amp-bf16": runs["amp-bf16"]}))
    (scaled,) = (replace(run, entry=replace(run.entry, run=runs["amp-fp16"])) for run in found)
    assert scaled.first_scale == 4.0
    assert histograms.counted([*found, scaled]) is scaled


def test_only_figures_with_something_to_show_are_drawn(runs):
    def drawn(runs):
        report = reported(runs)
        return {name for name in NAMES if FIGURES[name](report)}

    bare = replace(runs["amp-bf16"], findings=None)
    assert drawn({bare.name: bare}) == set()
    failed = replace(bare, name="x", result=replace(bare.result, status="failed"), steps=pd.DataFrame())
    assert drawn({failed.name: failed}) == set()
    alone = runs["amp-bf16"]
    assert drawn({alone.name: alone, "x": failed}) == {*NAMES} - {"exponents"}  # bf16 has the range of fp32
    assert drawn(runs) == set(NAMES)
