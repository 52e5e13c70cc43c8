"""All passes of the examination, on backends that are right; tests/planted has backends that are not."""

import copy
from dataclasses import replace

import pytest
import torch
from support.backends import BACKENDS, CPU_BACKENDS, each_backend_once, take_step
from support.judging import dataset_of, examined
from support.tasks import make_batch, make_task

from mpcompare.contract import Stepper
from mpcompare.loss_scale import DynamicLossScale, NoLossScale
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.schedules import Warmup
from mpcompare.tasks.task import params_of
from mpcompare.verdict.examine import new_step
from mpcompare.verdict.examine.examine import examine
from mpcompare.verdict.examine.subject import Subject

CPU = torch.device("cpu")
TASK = make_task(in_features=40, samples=32 * 25)
DATA = dataset_of(TASK)


@each_backend_once
def test_a_right_backend_updates_within_fp32_and_equals_a_new_one_from_its_weights(name, precision, device):
    task = make_task(in_features=40, samples=32 * 25, momentum=0.9)
    policy = DynamicLossScale() if precision == "fp16" else NoLossScale()
    run = examined(name, BACKENDS[name], task, DATA, precision, policy=policy, steps=4, device=device.type)
    findings, first = run.findings, run.findings.first
    assert findings.loss_scale is None
    assert [s.skipped for s in first.steps] == [False] * 3
    assert len(first.updates) == 3  # the second update shows the momentum
    assert all(e.excess <= 1 for update in first.updates for e in update.values())
    assert first.finite.effective_precision == precision
    for e in findings.last.gradients.values():
        assert e.error <= 2**-20 * e.norm
    assert findings.precision == precision
    assert abs(first.finite.loss - first.finite.exact_loss) < PRECISIONS[precision].unit_roundoff


def test_no_other_precision_is_tried_where_the_replay_shows_the_one_asked_for(monkeypatch):
    tried, compute = [], new_step.oracle
    monkeypatch.setattr(new_step, "oracle", lambda values, other: tried.append(other.name) or compute(values, other))
    monkeypatch.setattr(new_step, "_largest", lambda errors: 1.0)  # as if a unit had turned on
    findings = examined("amp", BACKENDS["amp"], TASK, DATA, "bf16", steps=1).findings
    assert (findings.first.finite.effective_precision, tried) == ("bf16", [])


def test_examining_does_not_write_to_what_it_is_given():
    model = TASK.new_model(0, CPU)
    kept, policy = copy.deepcopy(params_of(model)), DynamicLossScale()

    def make(model, policy):
        return BACKENDS["scratch"](model, TASK, "fp16", copy.deepcopy(policy))

    backend = make(model, policy)
    (x, y) = make_batch(TASK, CPU)
    rows = [{"step": 1, "loss": float(take_step(backend, x, y)), "loss_scale": 65536.0, "skipped": False}]

    def batches():
        while True:
            yield [(x, y)]

    subject = Subject(make, model, policy, PRECISIONS["fp16"], TASK, batches)
    list(examine(subject, Stepper(backend, TASK.new_rates()), rows, {}, 1))
    assert all(torch.equal(kept[name], p) for name, p in params_of(model).items())
    assert policy == DynamicLossScale()


CLIPPED = [
    pytest.param(name, precision, marks=[] if (name, precision) == ("scratch", "fp16") else [pytest.mark.slow])
    for name, precision in CPU_BACKENDS
    if name in ("amp", "scratch", "fused")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), CLIPPED)
def test_right_clips_and_counts_are_recorded(name, precision):
    task = replace(make_task(samples=32 * 12), clip_norm=0.1, accumulate=2, schedule=Warmup(3))
    findings = examined(name, BACKENDS[name], task, dataset_of(task), precision, steps=4).findings
    first = findings.first
    for clip in first.clips:
        assert clip.norm == pytest.approx(clip.should_norm, rel=1e-6)
        assert clip.norm_after == pytest.approx(0.1, rel=1e-4)
        assert all(e.factor == pytest.approx(clip.should_factor, rel=1e-6) for e in clip.factors.values())
    assert first.finite.micro_batches.counts == pytest.approx([1, 1], abs=0.02)
    assert first.known_mistakes == {}
    assert findings.resume.lost == []
    assert not any(step.moved_early for step in first.steps)
