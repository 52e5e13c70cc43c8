"""Differences that a backend declares: declared and kept, declared and not kept, and not declared."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from support.judging import dataset_of, examined
from support.tasks import make_task
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.peers.bf16_states import Bf16States
from mpcompare.backends.peers.bf16_weights import Bf16Weights
from mpcompare.backends.torch_model import clip_gradients
from mpcompare.errors import InputError
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.promises import NOTHING, Promises
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.contents import Report
from mpcompare.report.verdicts import judge_run

TASK = make_task(samples=32 * 12, momentum=0.9)
OWN_SCALE = {"init_scale": 1024.0, "growth_interval": 4}


def run(backend, precision, noise=0):
    return examined(backend.__name__, backend, TASK, dataset_of(TASK), precision, steps=6, noise=noise)


@cache
def amp(precision):
    return run(Amp, precision, noise=2)


@cache
def verdict(backend, precision="bf16"):
    return judge_run(run(backend, precision), amp(precision))


def declared(backend, promises):
    """Returns the backend with other promises than its own."""

    class Declared(backend):
        def __init__(self, model, task, precision, loss_scale):
            super().__init__(model, task, precision, loss_scale)
            self.promises = promises

    return Declared


class OwnLossScale(Amp):
    """The scale begins at 1024 and grows after 4 good steps, whatever was asked for."""

    def __init__(self, model, task, precision, loss_scale):
        if isinstance(loss_scale, DynamicLossScale):
            loss_scale = replace(loss_scale, **OWN_SCALE)
        super().__init__(model, task, precision, loss_scale)


class ClipsByDefault(Amp):
    """Gradients are clipped to a norm of 0.1 where the task clips nothing."""

    to = 0.1

    def clip(self):
        self.grad_norm = clip_gradients(replace(self.task, clip_norm=self.to), self.model.parameters())


class Skips(Amp):
    """A step whose gradients overflow is skipped, though nothing scales the loss."""

    def step(self, lr):
        if all(bool(g.isfinite().all()) for g in self.grads().values()):
            super().step(lr)
        else:
            self.skipped = True


class SkipsAndShowsNothing(Skips):
    """In a skipped step there are no gradients to be seen."""

    def unscale(self):
        super().unscale()
        self.finite = all(bool(g.isfinite().all()) for g in super().grads().values())

    def grads(self):
        return super().grads() if getattr(self, "finite", True) else {}

    def step(self, lr):
        if self.finite:
            Amp.step(self, lr)
        else:
            self.skipped = True


class DropsTheInfiniteUpdate(Amp):
    """The step is left out without a word."""

    def step(self, lr):
        if all(bool(g.isfinite().all()) for g in self.grads().values()):
            super().step(lr)


class SaysThatItSkipped(Amp):
    """The step is taken, though the backend says that it skipped."""

    def step(self, lr):
        super().step(lr)
        self.skipped = not all(bool(g.isfinite().all()) for g in self.grads().values())


class ClipsInTheStep(Amp):
    """Gradients are clipped to a norm of 0.25 where nobody sees it."""

    def step(self, lr):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
        super().step(lr)


class UpdatesTwice(Bf16Weights):
    def step(self, lr):
        super().step(2 * lr)


@pytest.mark.parametrize(
    ("backend", "promises", "precision", "said"),
    [
        pytest.param(
            Bf16Weights, Bf16Weights.promises, "bf16", "no master weights, moments in bf16", marks=pytest.mark.slow
        ),
        pytest.param(Bf16States, Promises(moments="bf16"), "fp16", "moments in bf16", marks=pytest.mark.slow),
        (
            OwnLossScale,
            Promises(loss_scale=OWN_SCALE),
            "fp16",
            "its own loss scale (starts at 1024, grows after 4 steps)",
        ),
        (ClipsByDefault, Promises(clip_norm=0.1), "bf16", "clips to a norm of 0.1"),
    ],
)
def test_a_promise_that_is_kept_is_a_difference_as_declared(backend, promises, precision, said):
    judged = verdict(declared(backend, promises), precision)
    assert str(judged) == f"differs as declared: {said}", judged.because
    assert "training (it differs as declared)" in judged.unchecked


@pytest.mark.slow
@pytest.mark.parametrize("backend", [Skips, SkipsAndShowsNothing])
def test_skipping_without_a_loss_scale_is_a_difference_that_leaves_training_as_it_is(backend):
    judged = verdict(declared(backend, Promises(skips_without_scale=True)))
    words = "skips steps whose gradients overflow, though its loss is not scaled"
    assert str(judged) == f"differs as declared: {words}", judged.because
    assert judged.unchecked == []
    judged = verdict(declared(backend, NOTHING))
    assert str(judged) == "differs: skip"
    assert judged.because == "inf or NaN in the gradients in step 1 of pass infinite input, and it says that it skipped"


@pytest.mark.parametrize(
    ("backend", "because"),
    [
        (Amp, "it does not say of a step with an infinite input that it skipped"),
        pytest.param(
            DropsTheInfiniteUpdate,
            "it does not say of a step with an infinite input that it skipped",
            marks=pytest.mark.slow,
        ),
        (SaysThatItSkipped, "it says of a step with an infinite input that it skipped, and the weights changed"),
    ],
)
def test_who_declares_to_skip_does(backend, because):
    judged = verdict(declared(backend, Promises(skips_without_scale=True)))
    assert str(judged) == "differs: promise"
    assert judged.because.endswith(because)


@pytest.mark.slow
def test_with_a_loss_scale_everybody_skips_and_nothing_shows_the_promise():
    judged = verdict(declared(Amp, Promises(skips_without_scale=True)), "fp16")
    assert str(judged) == "same", judged.because
    words = "skips steps whose gradients overflow, though its loss is not scaled"
    assert judged.unchecked == [f"declared, and nothing shows it: {words}"]


@pytest.mark.parametrize(
    ("backend", "precision", "cause"),
    [
        (Bf16Weights, "bf16", "no master weights"),
        pytest.param(Bf16States, "bf16", "moments", marks=pytest.mark.slow),
        pytest.param(OwnLossScale, "fp16", "loss scale", marks=pytest.mark.slow),
        pytest.param(ClipsInTheStep, "bf16", "clip", marks=pytest.mark.slow),
    ],
)
def test_the_same_differences_are_named_where_they_are_not_declared(backend, precision, cause):
    judged = verdict(declared(backend, NOTHING), precision)
    assert (judged.word, judged.cause) == ("differs", cause), judged.because


@pytest.mark.slow
@pytest.mark.parametrize(
    "promises",
    [Promises(weights="bf16", moments="bf16"), Promises(moments="bf16")],
)
def test_a_promise_that_is_not_kept_is_a_difference(promises):
    judged = verdict(declared(Amp, promises))
    assert (judged.word, judged.cause) == ("differs", "promise")
    assert judged.because.startswith("it declares ")


@pytest.mark.slow
def test_more_than_was_declared_is_a_difference():
    judged = verdict(UpdatesTwice)
    assert (judged.word, judged.cause) == ("differs", "optimizer"), judged.because
    judged = verdict(declared(ClipsByDefault, Promises(clip_norm=0.05)))
    assert (judged.word, judged.cause) == ("differs", "clip"), judged.because
    judged = verdict(declared(OwnLossScale, Promises(loss_scale={"init_scale": 512.0})), "fp16")
    assert (judged.word, judged.cause) == ("differs", "loss scale"), judged.because


def test_a_promise_that_nothing_can_show_is_said_to_be_unchecked():
    judged = verdict(declared(Amp, Promises(clip_norm=1e9)))
    assert str(judged) == "differs: clip"  # the backend says no norm
    judged = verdict(declared(type("ClipsToALargeNorm", (ClipsByDefault,), {"to": 1e9}), Promises(clip_norm=1e9)))
    assert str(judged) == "same"
    assert judged.unchecked == ["declared, and nothing shows it: clips to a norm of 1e+09"]


def reported(judged):
    """Returns a report on one run with this verdict."""
    entry = Entry(amp("bf16"), "the run", "", None, judged)
    return Report([Comparison("title", "data", entries=[entry])], "amp")


def test_strict_does_not_mind_a_difference_as_declared():
    kept = verdict(Bf16Weights)
    assert kept.word == "differs as declared"
    assert not reported(kept).differs
    assert reported(verdict(UpdatesTwice)).differs


@pytest.mark.parametrize("wrong", [{"weights": "fp16"}, {"moments": "fp8"}, {"rounding": "up"}, {"clip_norm": 0}])
def test_a_promise_of_anything_else_is_refused(wrong):
    (name, value) = next(iter(wrong.items()))
    with pytest.raises(InputError, match=f"promises.{name}={value}: expected"):
        Promises(**wrong)


class PutsBuffersBack(Amp):
    """A step that overflows leaves the running statistics as they were."""

    def forward(self, x, y):
        self.before = {name: b.clone() for name, b in self.model.named_buffers()}
        return super().forward(x, y)

    def update(self):
        super().update()
        if self.skipped:
            for name, b in self.model.named_buffers():
                b.copy_(self.before[name])


NORMED = replace(TASK, model=lambda: nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 5)))
RESTORES = Promises(restores_buffers=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (PutsBuffersBack, "differs: running statistics"),
        (declared(PutsBuffersBack, RESTORES), "differs as declared: puts buffers back after a step that it skips"),
        (declared(Amp, RESTORES), "differs: promise"),
    ],
)
def test_buffers_that_are_put_back_after_a_skip_are_to_be_declared(backend, said):
    normed, run = (
        examined(each.__name__, each, NORMED, dataset_of(TASK), "fp16", steps=6, noise=2) for each in (Amp, backend)
    )
    verdict = judge_run(run, normed)
    assert str(verdict) == said, verdict.because
