"""Backends that compute something else once they were loaded: timed backends compute as the examined ones did."""

import pytest
from support.judging import dataset_of, examined
from support.plans import SMALL_PLAN, replan
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.entrant.entrant import compete
from mpcompare.race.turns import Finish, Progress, Time, Train
from mpcompare.records import Recorder
from mpcompare.report.runs import read_run
from mpcompare.report.verdicts import judge_run

TASK = make_task(in_features=30, hidden=[24], batch_size=64, samples=640)


class HalfOfTheRows(Amp):
    """``amp`` that takes half of each batch once it was loaded, and needs half of the time."""

    loaded = False

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = True

    def forward(self, x, y):
        half = len(x) // 2 if self.loaded else len(x)
        return super().forward(x[:half], y[:half])


class ScalerForgotten(Amp):
    """A loaded backend begins with the first loss scale again."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "loss_scale": {}})


class MomentumForgotten(Amp):
    """A loaded backend begins with no momentum."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "optimizer": {}})


def failed_kinds(verdict):
    return {check.kind for check in verdict.checks if not check.passed}


@pytest.mark.parametrize(
    ("backend", "precision"),
    [(HalfOfTheRows, "fp16"), (HalfOfTheRows, "bf16"), (ScalerForgotten, "fp16"), (MomentumForgotten, "bf16")],
)
def test_what_was_loaded_goes_on_as_what_was_not(backend, precision):
    task = make_task(in_features=30, hidden=[24], batch_size=64, samples=640, momentum=0.9)
    dataset = dataset_of(task)
    amp = examined("amp", Amp, task, dataset, precision, steps=6, noise=2)
    assert "resume" not in failed_kinds(judge_run(amp, amp))
    verdict = judge_run(examined("cheat", backend, task, dataset, precision, steps=6), amp)
    assert (verdict.word, verdict.cause) == ("differs", "resume")


def timed(backend, folder):
    """Takes every turn of a run. Returns the run as its record is read back."""
    plan = replan(
        SMALL_PLAN, backend="amp", make_backend=backend, is_baseline=True, task=TASK, precision="bf16",
        load_data=lambda seed: dataset_of(TASK, seed), verdict={"enabled": True, "noise": 2},
    )  # fmt: skip
    config = {"task": {}, "train": {"steps": 4, "warmup_steps": 1}}
    at_start = {"backend": "amp", "task": "small", "batch_size": 64, "seed": 0, "config": config}
    turns = compete(plan, Recorder(folder, at_start))

    def turn(order):
        event = turns.send(order)
        while isinstance(event, Progress):
            event = next(turns)

    turn(None)
    turn(Train())
    for number in (1, 2, 3):
        turn(Time(number))
    with pytest.raises(StopIteration):
        turn(Finish(rounds=3, stopped="budget", half_width=0.5, seconds=1.0, race=None))
    return read_run(folder)


def test_the_loss_of_timed_steps_is_that_of_the_examined_backend(tmp_path):
    for name, backend in (("amp", Amp), ("cheat", HalfOfTheRows)):
        (tmp_path / name).mkdir()
        run = timed(backend, tmp_path / name)
        checks = {c.name: c for c in judge_run(run, run).checks if c.kind == "timed steps"}
        assert checks["loss of timed steps"].passed is (name == "amp")
        if name == "amp":
            assert run.result["timed_loss_difference"] == 0  # bit for bit
