"""The verdict on what comes between gradients and weights: accumulation, clipping, optimizer, schedule, resuming."""

import math
from dataclasses import replace

import pytest
import torch
from planted.power import judged_case
from planted.recipe import RECIPE, planted_run
from support.backends import BACKENDS, CPU_COLUMNS
from support.correct_recipe import recipe_case
from support.judging import dataset_of, examined
from support.marks import slow_after
from support.tasks import make_task

from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.schedules import Warmup
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.examine import lost_entries
from mpcompare.verdict.examine.known_mistakes import ELEMENTS, Update, other_rules, some_of
from mpcompare.verdict.examine.oracle import exact_step
from mpcompare.verdict.judge.accumulation import wrong_sum
from mpcompare.verdict.judge.clipping import norm_error
from mpcompare.verdict.judge.updates import RULES
from mpcompare.verdict.judge.verdict import judge_run

# Each in one precision by the plain command.
BUGS = [
    pytest.param(name, precision, marks=[pytest.mark.slow] if n else [])
    for name, bug in RECIPE.items()
    for n, precision in enumerate(bug.precisions)
]
CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "precision"), BUGS)
def test_a_planted_bug_is_found_and_named(name, precision):
    verdict = judge_run(*planted_run(name, RECIPE[name], precision))
    if RECIPE[name].invisible:
        assert verdict.word == "same"  # or it is not invisible any more
    else:
        assert (verdict.word, verdict.cause) == ("differs", RECIPE[name].cause), verdict.because


@pytest.mark.parametrize("seed", slow_after(1, range(2000, 2010)))
def test_correct_runs_are_the_same_whatever_the_recipe(seed):
    found = judged_case(recipe_case(seed, "fp16" if seed % 2 else "bf16"))
    assert [f"{name}: {v}: {v.because}" for name, v in found if v.word not in ("same", "reference")] == []


def test_what_cannot_be_checked_for_adam_is_said():
    task = replace(make_task(samples=32 * 12), optimizer=AdamW(1e-3))
    amp, scratch = (
        examined(n, BACKENDS[n], task, dataset_of(task), "bf16", steps=4, noise=2) for n in ("amp", "scratch")
    )
    verdict = judge_run(scratch, amp)
    assert verdict.word == "same", verdict.because
    assert verdict.unchecked == ["first change of the weights (the optimizer is not linear in the gradients)"]
    assert not [check for check in verdict.checks if check.kind == "first change"]


@pytest.mark.parametrize(("name", "precision"), [c for c in CPU_COLUMNS if c[0] in ("amp", "scratch", "fused")])
def test_right_clips_and_counts_are_recorded(name, precision):
    task = replace(make_task(samples=32 * 12), clip_norm=0.1, accumulate=2, schedule=Warmup(3))
    found = examined(name, BACKENDS[name], task, dataset_of(task), precision, steps=4).numerics
    assert found["first"]["rates"] == pytest.approx([0.1 / 3, 0.2 / 3])
    for clip in found["first"]["clips"]:
        assert clip["norm"] == pytest.approx(clip["should_norm"], rel=1e-6)
        assert clip["norm_after"] == pytest.approx(0.1, rel=1e-4)
        assert all(e["factor"] == pytest.approx(clip["should_factor"], rel=1e-6) for e in clip["factors"].values())
    assert found["first"]["micro_batches"]["counts"] == pytest.approx([1, 1], abs=0.02)
    assert "other_rules" not in found["first"]
    assert found["reload"]["lost"] == []
    assert not any(step["moved_early"] for step in found["first"]["steps"])


def test_the_oracle_adds_what_its_micro_batches_make():
    task = replace(make_task(batch_size=30), accumulate=3)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 20, generator=generator), torch.randint(5, (30,), generator=generator)
    model = task.new_model(0, CPU)
    exact = exact_step(model, task.loss_fn, task.micro_batches(x, y), "bf16")
    whole = exact_step(model, task.loss_fn, [(x, y)], "bf16")
    assert whole.shares == []
    assert all(torch.allclose(g, whole.grads[name], rtol=1e-12) for name, g in exact.grads.items())
    parts = [exact_step(model, task.loss_fn, [part], "bf16").grads for part in task.micro_batches(x, y)]
    assert exact.largest == pytest.approx(max(g.abs().max().item() for part in parts for g in part.values()) / 3)
    mixed = {name: sum(c * part[name] for c, part in zip((2, 0, 1), parts, strict=True)) / 3 for name in parts[0]}
    found = numerics.shares_of(mixed, exact.shares)
    assert found["counts"] == pytest.approx([2, 0, 1])
    assert found["rest"] < 1e-12


@pytest.mark.parametrize(
    ("counts", "rest", "says"),
    [
        ([1.0, 1.01], 0.1, ""),
        ([2.0, 2.0], 0.1, "every micro-batch counts 2 times: the loss is not divided by task.accumulate"),
        ([0.5, 0.5], 0.1, "every micro-batch counts 0.5 times: divided by it twice"),
        ([3.0, 3.0], 0.1, ""),  # gradients are scaled, and not by their number
        ([0.0, 1.0], 0.1, "the micro-batches count 0, 1 times, where each counts once"),
        ([0.0, 1.0], 5.0, ""),  # something else is wrong
        ([0.9, 1.1], 0.1, ""),  # rounding errors may make this
        ([math.nan, 1.0], 0.1, ""),
    ],
)
def test_sums_of_micro_batches_are_named_only_where_the_counts_tell(counts, rest, says):
    assert wrong_sum({"counts": counts, "rest": rest, "smallest": 1.0}, limit=0.1) == says


def test_a_right_optimizer_follows_no_other_rule_and_each_rule_has_a_name():
    for optimizer in (Sgd(0.1, 0.9, nesterov=True, weight_decay=0.1), Adam(0.1, weight_decay=0.1), AdamW(0.1)):
        task = replace(make_task(), optimizer=optimizer, schedule=Warmup(5), clip_norm=1.0, accumulate=2)
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(30, 3 * ELEMENTS))
        torchs, updates = optimizer.make([p]), []
        for number in range(3):
            lr, g = optimizer.lr * task.schedule.factor(number), torch.randn(p.shape)
            p.grad, before = g.clone(), p.detach().clone()
            torchs.param_groups[0]["lr"] = lr
            torchs.step()
            tensors = [some_of({"w": t}) for t in (before, p.detach(), 2 * g, g)]
            updates.append(Update(*tensors, lr, number, number))
        assert updates[0].before["w"].shape[0] <= ELEMENTS
        assert other_rules(task, updates, torch.bfloat16) == {}
        wrong = [replace(update, after={"w": 2 * update.after["w"] - update.before["w"]}) for update in updates]
        found = other_rules(task, wrong, torch.bfloat16)
        assert set(found) <= set(RULES)
        assert min(found.values()) > 1  # updating twice is no rule


def test_a_norm_in_fp32_is_within_its_error():
    for elements in (10, 10_000, 10_000_000):
        g = torch.rand(elements, generator=torch.Generator().manual_seed(0)) + 0.5
        exact = g.double().norm().item()
        for norm_type in (2.0, math.inf):
            error, tiny = norm_error({"elements": elements, "norm_type": norm_type})
            true = exact if norm_type == 2 else g.double().max().item()
            assert abs(torch.linalg.vector_norm(g, norm_type).item() - true) <= error * true + tiny
        squares = g.square().cumsum(0, dtype=torch.float32)[-1] if elements <= 10_000 else g.square().sum()
        error, _ = norm_error({"elements": elements, "norm_type": 2.0})
        assert abs(squares.sqrt().item() - exact) <= error * exact


def test_what_a_state_lost_is_listed():
    def state(**changes):
        found = {
            "params": {"w": torch.tensor([1.0, 0.0])},
            "buffers": {"mean": torch.zeros(2)},
            "optimizer": {"exp_avg": {"w": torch.ones(2)}, "step": {"w": torch.ones(())}},
            "loss_scale": {"scale": 4.0, "growth_tracker": 1},
        }
        return {**found, **changes}

    assert lost_entries(state(), state()) == []
    assert lost_entries(state(params={"w": torch.tensor([1.0, -0.0])}), state()) == ["params"]  # bit for bit
    other = state(optimizer={"exp_avg": {"w": torch.ones(2)}}, loss_scale={"scale": 2.0}, buffers={})
    assert lost_entries(state(), other) == [
        "buffers",
        "optimizer.step",
        "loss_scale.scale",
        "loss_scale.growth_tracker",
    ]
    assert lost_entries(other, state()) == ["loss_scale.scale"]  # what is there beside it was not lost


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
