"""Held-out loss and accuracy are written while a network trains, and training does not notice."""

import json
import time
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
import torch
from support.entrants import AT_START, PLAN, turn
from support.networks import DroppingGpt
from support.plans import replan
from support.tasks import make_task
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.entrant import evaluation
from mpcompare.entrant.entrant import compete
from mpcompare.entrant.evaluation import score
from mpcompare.errors import InputError
from mpcompare.race.orders import Train
from mpcompare.records import EVALS, RunRecorder
from mpcompare.report.runs import read_run
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.draws import state
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task, params_of


def normalised():
    """Returns a network with running statistics, which evaluating must not move."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def noisy_cross_entropy(output, targets):
    """Returns a loss that draws from torch's generator, which evaluating must leave as it is."""
    return nn.functional.cross_entropy(output, targets) + 0.01 * torch.rand(())


PLAN = replan(
    PLAN, make_backend=Amp, precision="bf16", train={"steps": 6, "warmup_steps": 1},
    task=Task(normalised, noisy_cross_entropy, Sgd(0.1, 0.9), batch_size=32), load_data=partial(digits, samples=96),
)  # fmt: skip


def train(folder, **changes):
    """Runs up to the end of training. Returns ``steps.csv`` without times, ``evals.csv`` and ``result.json``."""
    folder.mkdir()
    torch.manual_seed(1)
    turns = compete(replan(PLAN, **changes), RunRecorder(folder, AT_START))
    turn(turns, None)
    turn(turns, Train())
    turns.close()
    steps = pd.read_csv(folder / "steps.csv").drop(columns="step_ms")
    return steps, pd.read_csv(folder / "evals.csv"), json.loads((folder / "result.json").read_text())


@pytest.mark.slow
def test_evaluating_after_every_step_changes_no_bit_of_training(tmp_path):
    steps, evals, result = train(tmp_path / "0")
    evaluated, curve, again = train(tmp_path / "1", eval={"every": 1})
    pd.testing.assert_frame_equal(steps, evaluated, check_exact=True)
    assert evals["step"].tolist() == [7]
    assert curve["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    pd.testing.assert_frame_equal(evals, curve[6:].reset_index(drop=True), check_exact=True)
    for key in ("test_loss", "test_accuracy", "final_loss"):
        assert result[key] == again[key]
    assert curve["test_loss"].iloc[-1] == result["test_loss"]
    assert curve["test_accuracy"].iloc[-1] == result["test_accuracy"]
    assert curve["test_loss"].is_unique  # each step's own network is evaluated


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [(None, [7]), (2, [2, 4, 6, 7]), (7, [7]), (100, [7])])
def test_the_last_step_is_always_evaluated_and_once(tmp_path, schedule):
    every, steps = schedule
    assert train(tmp_path / "0", eval={"every": every})[1]["step"].tolist() == steps


@pytest.mark.slow
def test_no_step_time_holds_an_evaluation(tmp_path, monkeypatch):
    evaluate = evaluation.evaluate

    def slowly(*args):
        time.sleep(0.5)
        return evaluate(*args)

    monkeypatch.setattr(evaluation, "evaluate", slowly)
    train(tmp_path / "0", eval={"every": 2})
    assert (pd.read_csv(tmp_path / "0" / "steps.csv")["step_ms"] < 400).all()


def test_the_score_is_the_mean_over_all_samples_also_where_the_last_part_is_shorter():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(70, 20, generator=generator), torch.randint(5, (70,), generator=generator)
    task = make_task(batch_size=32)
    network, sizes = task.new_model(0, torch.device("cpu")), []

    def forward(x):
        sizes.append(len(x))
        return network(x)

    found = score(forward, Dataset("d", "r", x[:1], y[:1], x, y), task)
    assert sizes == [32, 32, 6]
    with torch.no_grad():
        assert found["test_loss"] == pytest.approx(nn.functional.cross_entropy(network(x), y).item(), rel=1e-6)
        assert found["test_accuracy"] == (network(x).argmax(1) == y).sum().item() / 70


def test_evaluations_are_read_back_and_a_record_without_them_has_none(tmp_path):
    at_start = {"status": "running", "config": {"task": {}}}
    at_start |= {**dict.fromkeys(("precision", "task", "batch_size", "seed")), "backend": "amp"}
    recorder = RunRecorder(tmp_path, at_start)
    assert len(read_run(tmp_path).evals) == 0
    recorder.append(EVALS, [{"step": 2, "test_loss": 1.5, "test_accuracy": None}])
    recorder.append(EVALS, [{"step": 4, "test_loss": float("inf"), "test_accuracy": 0.5}])
    evals = read_run(tmp_path).evals
    assert evals["step"].tolist() == [2, 4]
    assert evals["test_loss"].tolist() == [1.5, float("inf")]
    assert evals["test_accuracy"].isna().tolist() == [True, False]


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "often"])
def test_what_is_no_number_of_steps_is_named(every):
    with pytest.raises(InputError, match=f"eval.every={every}: expected a whole number of at least 1, or null"):
        replan(PLAN, eval={"every": every})


def test_evaluation_drops_nothing():
    task = Task(partial(DroppingGpt, (20, 8, 16, 2, 1), 0.5, True), "cross_entropy", Sgd(0.1), 8)
    model, tokens = task.new_model(0, torch.device("cpu")), torch.arange(16 * 8).reshape(16, 8) % 20
    dataset = Dataset("d", "", tokens, tokens, tokens, tokens)
    before = state(torch.device("cpu"))
    first, again = (evaluation.evaluate(model, params_of(model), {}, dataset, task) for _ in range(2))
    assert first == again
    assert model.training
    assert state(torch.device("cpu")) == before
    dropping = score(model, dataset, task)
    assert dropping != first


def test_the_examination_evaluates_whole_micro_batches():
    """A loss may want so many rows, as a loss of pairs does. If there are fewer samples, all are taken."""
    seen = []

    def loss(output, y):
        seen.append(len(y))
        return nn.functional.cross_entropy(output, y)

    task = Task(normalised, loss, Sgd(0.1, 0.9), batch_size=32, accumulate=2)
    model, plain = task.new_model(0, torch.device("cpu")), digits(0, samples=64)
    for samples, expected in ((75, [16] * 4), (15, [15])):
        data = replace(
            plain, x_test=plain.x_train[:1].repeat(samples, 1, 1, 1), y_test=plain.y_train[:1].repeat(samples)
        )
        seen.clear()
        found = evaluation.held_out_of(model, data, task, steps=64)(params_of(model), {})
        assert seen == expected
        assert found.targets == sum(expected)


def test_an_accuracy_of_the_examination_is_a_share_of_the_labels_that_count():
    x, y = torch.randn(64, 4, 3), torch.zeros(64, 4, dtype=torch.int64)
    y[:, 1:] = -100
    task = Task(partial(nn.Linear, 3, 5), "masked_cross_entropy", Sgd(0.1), batch_size=32)
    model = task.new_model(0, torch.device("cpu"))
    for labels, targets in ((y, 64), (torch.full_like(y, -100), 1)):
        data = Dataset("masked", "", x, labels, x, labels)
        assert evaluation.held_out_of(model, data, task, steps=64)(params_of(model), {}).targets == targets


class Viewed(nn.Linear):
    """Asks for samples that lie one after the other, as a loader gives them."""

    def forward(self, x):
        return super().forward(x.view(-1, 3)).view(len(x), 2, 5)


def test_held_out_samples_of_the_examination_lie_one_after_the_other():
    task = Task(partial(Viewed, 3, 5), "cross_entropy", Sgd(0.1), batch_size=32)
    x, y = torch.randn(2048, 2, 3), torch.randint(5, (2048, 2))
    model = task.new_model(0, torch.device("cpu"))
    found = evaluation.held_out_of(model, Dataset("pairs", "", x, y, x, y), task, steps=64)(params_of(model), {})
    expected = nn.functional.cross_entropy(model(x[::16].contiguous()).flatten(0, 1), y[::16].flatten())
    assert found.targets == 256
    assert abs(found.loss - expected.item()) < 1e-6
