"""Correct runs are not accused, whatever the task, which is the other half of the verdict's power."""

from dataclasses import replace

import pytest
from planted.judged import reference
from planted.mlp import MLP
from support.backends import BACKENDS
from support.cases import CASES, random_task
from support.correct import PlainProducts
from support.judging import accused, dataset_of, examined
from support.marks import BF16_LSTM, CUDA, slow_after
from support.tasks import make_task, mlp_of

from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.data.generated import synthetic
from mpcompare.tasks.optimizers import AdamW, Sgd
from mpcompare.tasks.schedules import Warmup
from mpcompare.tasks.task import Task


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("precision", slow_after(1, ["bf16", "fp16"]))
@pytest.mark.parametrize("seed", slow_after(1, range(25)))
def test_correct_runs_are_the_same_whatever_the_task(seed, precision, device):
    """There are 100 correct runs: 25 shapes, depths, losses and seeds, in two precisions, with two backends."""
    task = random_task(seed)
    mlp = mlp_of(task)
    dataset = synthetic(seed, task.samples, mlp.in_features, mlp.out_features, task.loss)
    amp = examined("amp", BACKENDS["amp"], task, dataset, precision, seed, noise=2, device=device)
    assert judge_run(amp, amp).word == "reference"
    for name in ("scratch", "fused"):
        run = examined(name, BACKENDS[name], task, dataset, precision, seed, device=device)
        verdict = judge_run(run, amp)
        # These backends show no layers. In a deep network, or behind a layer of 3 units, one rounding of each result of
        # the whole network may be a large part of a gradient.
        expected = ("same", "not seen")
        assert verdict.word in expected, (name, task, verdict.cause, verdict.because)
        assert all(what.startswith("training from step") for what in verdict.unchecked)


@pytest.mark.slow
@pytest.mark.parametrize("precision", slow_after(1, ["fp16", "bf16"]))
def test_scratch_and_fused_are_the_same_on_real_digits(precision):
    task, dataset, amp = reference(MLP, precision)
    for name in ("scratch", "fused"):
        verdict = judge_run(examined(name, BACKENDS[name], task, dataset, precision), amp)
        assert verdict.word == "same", verdict.because
        ratios = [c.value / c.limit for c in verdict.checks if c.name.startswith("gradient in the first step, ")]
        assert max(ratios) < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("family", ["cnn", "lstm", "gpt"])
def test_correct_runs_of_a_family_are_the_same(family):
    assert accused(CASES[family](2, "bf16")) == []


@pytest.mark.parametrize("family", ["cnn", "lstm", "gpt", "unstable"])
@pytest.mark.parametrize("seed", slow_after(0, range(100, 106)))
def test_more_correct_runs_of_a_family_are_the_same(family, seed):
    assert accused(CASES[family](seed, "bf16" if seed % 2 or family in ("cnn", "lstm") else "fp16")) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", ["cnn", pytest.param("lstm", marks=BF16_LSTM), "gpt"])
def test_compiled_runs_of_a_family_are_the_same(family):
    case = CASES[family](0, "bf16")
    amp = examined("amp", BACKENDS["amp"], case.task, case.dataset, "bf16", steps=case.steps, noise=2)
    run = examined("compiled", BACKENDS["amp_compile"], case.task, case.dataset, "bf16", steps=case.steps)
    verdict = judge_run(run, amp)
    assert verdict.word in ("same", "not seen"), verdict.because  # its layers call no hooks


def unstable_task(hidden: list[int], batch_size: int, lr: float, momentum: float) -> Task:
    return make_task(
        in_features=784, hidden=hidden, out_features=10, batch_size=batch_size, samples=2570, lr=lr, momentum=momentum
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scratch", "fused", "plain products"])
def test_training_that_is_unstable_is_not_held_against_a_backend(name):
    """Losses go up, gradients overflow and steps are skipped, and each correct run goes its own way from there."""
    task = unstable_task([33, 5, 17], 257, 0.3, 0.95)
    backend = PlainProducts if name == "plain products" else BACKENDS[name]
    dataset = dataset_of(task)
    amp = examined("amp", BACKENDS["amp"], task, dataset, "fp16", steps=43, noise=2)
    verdict = judge_run(examined(name, backend, task, dataset, "fp16", steps=43), amp)
    assert verdict.word == "same", verdict.because


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.3, 1.0])
@pytest.mark.parametrize("hidden", [[33, 5, 17], [64, 64]])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_large_learning_rates_are_not_held_against_a_backend(lr, hidden, seed):
    task = unstable_task(hidden, 128, lr, 0.95)
    dataset = dataset_of(task, seed)
    amp = examined("amp", BACKENDS["amp"], task, dataset, "fp16", seed, steps=43, noise=2)
    verdict = judge_run(examined("scratch", BACKENDS["scratch"], task, dataset, "fp16", seed, steps=43), amp)
    assert verdict.word in ("same", "not seen"), verdict.because


@pytest.mark.parametrize("seed", slow_after(0, range(2000, 2010)))
def test_correct_runs_are_the_same_whatever_the_recipe(seed):
    assert accused(CASES["recipe"](seed, "fp16" if seed % 2 else "bf16")) == []


@pytest.mark.parametrize("seed", slow_after(0, range(3000, 3010)))
def test_correct_runs_with_dropout_and_checkpoints_are_the_same(seed):
    assert accused(CASES["dropout"](seed, "fp16" if seed % 2 else "bf16")) == []


@pytest.mark.parametrize("seed", slow_after(1, range(3000, 3006)))
@pytest.mark.parametrize("family", slow_after(0, ["masked", "groups", "branches"]))
def test_correct_runs_are_the_same_whatever_the_groups_branches_and_masks(family, seed):
    assert accused(CASES[family](seed, "fp16" if seed % 2 else "bf16")) == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [Sgd(0.05, 0.9), AdamW(1e-3)])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_graph_shows_clipped_gradients_and_is_the_same(precision, optimizer, recorded_graphs):
    task = make_task(in_features=784, hidden=[32], out_features=10, samples=32 * 12)
    task = replace(task, optimizer=optimizer, clip_norm=0.2, accumulate=2, schedule=Warmup(4))
    data = dataset_of(task)
    amp = examined("amp", BACKENDS["amp"], task, data, precision, steps=4, noise=2)
    run = examined("fused", BACKENDS["fused"], task, data, precision, steps=4, options={"graph": True})
    verdict = judge_run(run, amp)
    assert verdict.word == "same", verdict.because
    clips = [check for check in verdict.checks if check.kind == "clip"]
    assert clips
    assert all(check.name.startswith("norm of the clipped gradients") for check in clips)
