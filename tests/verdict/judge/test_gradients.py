"""Errors of one sign: gradients that are cut off to 16 bits, compared with gradients that are rounded to nearest."""

from dataclasses import replace

import pytest
import torch
from planted.real.wholly import truncated
from scipy import special
from support.backends import BACKENDS
from support.judging import compared_with_amp, dataset_of, examined
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.text import CharGpt
from mpcompare.verdict.examine.layers import layers
from mpcompare.verdict.judge.check import Examined
from mpcompare.verdict.judge.errors import GradientError, PlaceError, RoundingError
from mpcompare.verdict.judge.limits import error_like, signed_limit, sum_error, tensor_limit

TASK = make_task(in_features=784, hidden=[256], out_features=10, batch_size=256, samples=256 * 5)
TASK = replace(TASK, accumulate=4)  # sums have more digits than bf16, which can be cut off
DATA = dataset_of(TASK)


class Shortened(Amp):
    """Stores its gradients in bf16."""

    def unscale(self):
        super().unscale()
        for p in self.model.parameters():
            p.grad = self.short(p.grad)


class Nearest(Shortened):
    short = staticmethod(lambda g: g.bfloat16().float())


class CutOff(Shortened):
    short = staticmethod(truncated)


def judged(backend):
    return compared_with_amp(backend, TASK, DATA, "bf16", steps=4)


@pytest.mark.slow
def test_gradients_that_are_cut_off_are_named_though_their_error_is_small():
    verdict = judged(CutOff)
    assert (verdict.word, verdict.cause) == ("differs", "rounding"), verdict.because
    assert "errors of one sign, as of numbers that are cut off" in verdict.because
    gradients = [check for check in verdict.checks if check.name.startswith("gradient in the first step")]
    assert all(check.passed for check in gradients)


@pytest.mark.slow
def test_gradients_that_are_rounded_to_nearest_are_right():
    verdict = judged(Nearest)
    assert verdict.word == "same", verdict.because
    signed = [
        check.value / check.limit for check in verdict.checks if check.name.startswith("signed error in the first step")
    ]
    assert len(signed) == 4
    assert max(signed) < 0.6


@pytest.mark.slow
def test_in_any_one_direction_roundings_are_smaller_than_in_all():
    findings = examined("amp", BACKENDS["amp"], TASK, DATA, "bf16", steps=2).findings
    roundings = findings.replays["first"].rounding
    for name, rounding in roundings.items():
        assert isinstance(rounding, RoundingError)
        assert 0 < rounding.along < rounding.error, name
    assert roundings["layer1.weight"].along < 0.3 * roundings["layer1.weight"].error


@pytest.mark.parametrize(
    ("precision", "uses", "zeros", "passes"),
    [
        ("bf16", 2, 12, True),
        ("bf16", 2, 60, False),
        pytest.param("fp16", 2, 12, True, marks=pytest.mark.slow),
        pytest.param("fp16", 2, 25, False, marks=pytest.mark.slow),
        pytest.param("bf16", 1, 12, False, marks=pytest.mark.slow),
    ],
)
def test_a_few_zeros_of_a_tied_weight_are_two_numbers_that_cancel(precision, uses, zeros, passes):
    """A tied weight's gradient is the sum of two 16-bit gradients. In the head of a GPT-2 in bf16, 9 of 16,384 elements
    were 0, and each of them was the sum of two numbers that were equal but for their signs."""
    task = make_task(in_features=128, hidden=[16], out_features=10)
    amp, run = (examined("run", BACKENDS["amp"], task, dataset_of(task), precision, steps=2) for _ in range(2))
    name, first = "layer1.weight", run.findings.replays["first"]
    layers = {**run.findings.layers, name: replace(run.findings.layers[name], uses=uses)}
    gradients = dict(first.gradients)
    gradients[name] = replace(gradients[name], zeros=zeros / gradients[name].elements)
    replays = {"first": replace(first, gradients=gradients)}
    verdict = judge_run(replace(run, findings=replace(run.findings, replays=replays, layers=layers)), amp)
    (check,) = (check for check in verdict.checks if check.name == f"zeros in the first step, {name}")
    assert check.value == pytest.approx(zeros)
    assert check.passed is passes


def test_the_uses_of_a_tied_weight_and_of_a_layer_that_is_called_twice_are_counted():
    model = CharGpt(11, 6, width=8, heads=2, blocks=1, tied=True)
    order = ["embedding", "blocks.0.up", "blocks.0.up#2", "output"]
    found, _ = layers(model, order, torch.zeros(2, 6, dtype=torch.int64), rows=2)
    uses = {name: layer.uses for name, layer in found.items()}
    assert {name for name, count in uses.items() if count == 2} >= {"embedding.weight", "blocks.0.up.weight"}
    assert uses["positions.weight"] == uses["blocks.0.down.weight"] == 1


@pytest.mark.slow
def test_a_reference_beyond_roundings_shows_one_draw_of_its_errors():
    findings = examined("amp", Amp, TASK, DATA, "bf16", steps=2).findings
    run, rounding = Examined("amp", "bf16", {}, findings, None), RoundingError(0.01, 16.0, 4, 0.001)
    e = GradientError(error=0.0, norm=1.0, largest=0.0, slope=1.0, residual=0.0, zeros=0.0, elements=1000)
    of = {error: replace(e, error=error) for error in (0.001, 0.01, 0.1)}
    sums = sum_error(run) / run.unit_roundoff
    limits = {error: tensor_limit(run, each, rounding) for error, each in of.items()}
    assert limits[0.001] == limits[0.01]  # roundings alone make more
    assert limits[0.1] == pytest.approx(0.2 * special.fdtri(16, 16, 0.999) ** 0.5 + 0.01 * sums)
    signed = {error: signed_limit(run, each, rounding) for error, each in of.items()}
    assert signed[0.001] == signed[0.01]
    assert signed[0.1] == pytest.approx(10 * signed[0.01], rel=0.01)  # though the reference's slope is 1 by luck
    short = signed_limit(run, e, replace(rounding, along=1e-6))  # the samples' part, too
    assert short == pytest.approx(2 * special.stdtrit(4 * 16, 0.9995) * 0.01 / 16**0.5 + 0.01 * sums)


def test_the_error_of_a_sum_that_cancels_is_relative_to_its_terms():
    reference = PlaceError(error=7e-4, norm=1.3e-3, rounding=5e-7, dimensions=2.0, samples=4, terms=5.6)
    run = replace(reference, error=1e-3, norm=4e-4, terms=3.4)
    assert error_like(reference, run) == pytest.approx(7e-4 * 3.4 / 5.6)
    assert error_like(replace(reference, terms=0.0, norm=2.0), replace(run, norm=6.0)) == pytest.approx(3 * 7e-4)
