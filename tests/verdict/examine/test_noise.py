"""The noise runs: the reference once more, with changes that must not matter."""

import pytest
import torch
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_batch, make_task

from mpcompare.loss_scale import NoLossScale
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.task import params_of
from mpcompare.verdict.examine.noise import order_is_free, train_again
from mpcompare.verdict.examine.subject import Subject

CPU = torch.device("cpu")
TASK = make_task(in_features=40, samples=32 * 25)
DATA = dataset_of(TASK)


@pytest.mark.slow
def test_noise_runs_are_the_same_function_and_not_the_same_roundings():
    model, batch, u = TASK.new_model(3, CPU), make_batch(TASK, CPU), 2.0**-8
    made, initial = [], params_of(model)

    def make(model, policy):
        made.append((BACKENDS["amp"](model, TASK, "bf16", policy), params_of(model)))
        return made[-1][0]

    def batches():
        while True:
            yield [batch]

    subject = Subject(make, model, NoLossScale(), PRECISIONS["bf16"], TASK, batches)
    for number in range(2):
        list(train_again(subject, [{"step": 1, "skipped": False}, {"step": 2, "skipped": False}], number, 2))
    starts = [start for _, start in made]
    for start in starts:
        for name, p in start.items():
            change = ((p - initial[name]) / initial[name]).abs()
            assert u / 2 < change.max() <= u * (1 + 2.0**-10)  # less than a rounding, but other numbers
    assert not torch.equal(starts[0]["layer1.weight"], starts[1]["layer1.weight"])
    assert order_is_free(model, TASK.loss_fn, *batch)
    weights = torch.arange(16)
    assert not order_is_free(model, lambda output, y: (output.mean(dim=1) * weights).sum(), *batch)

    run = examined("amp", BACKENDS["amp"], TASK, DATA, "fp16", steps=5, noise=2)
    again = run.findings.noise
    losses = run.steps["loss"].tolist()
    assert len(again) == 2
    assert "loss scale 32768" in again[0].change
    assert "loss scale 16384" in again[1].change
    for other in again:
        differences = [abs(a - b) for a, b in zip(losses, other.losses, strict=True)]
        assert 0 < max(differences) < 2.0**-10
        assert "rows in another order" in other.change
        assert other.skipped == [False] * 5
    assert examined("amp", BACKENDS["amp"], TASK, DATA, "fp16", steps=5).findings.noise == []
