"""One entrant, driven turn by turn as a race does."""

import json
import types

import pandas as pd
import pytest
import torch
from conftest import make_task

from mpcompare.backends.fp32 import Fp32
from mpcompare.cost import memory
from mpcompare.entrant import entrant as train
from mpcompare.loss_scale import auto
from mpcompare.measure import meter
from mpcompare.native import ops
from mpcompare.race.turns import Finish, Progress, Time, Train
from mpcompare.records import Recorder
from mpcompare.tasks import data, mlp

STARTS = []


class Watched(Fp32):
    """Notes the weights and the batch of its first step."""

    def forward(self, x, y):
        if not hasattr(self, "begun"):
            self.begun = True
            STARTS.append((mlp.fingerprint(self.master_params()), x.sum().item()))
        return super().forward(x, y)


def turn(turns, order):
    event = turns.send(order)
    while isinstance(event, Progress):
        event = next(turns)
    return event


@pytest.fixture
def entrant(tmp_path):
    task = make_task(in_features=784, out_features=10)
    job = train.Job(
        backend="fp32", make_backend=Watched, options={}, task=task, load_data=data.digits, loss_scale=auto,
        precision="auto", engine="auto", device="cpu", seed=0, steps=4, warmup_steps=1, deterministic=False,
        block_s=0.002, examine=False, noise=0, is_baseline=False,
    )  # fmt: skip
    STARTS.clear()
    identity = {"backend": "fp32", "config": {}}
    return train.run(job, Recorder(tmp_path, identity))


def test_every_block_times_the_same_steps_from_the_trained_weights(entrant, tmp_path):
    turn(entrant, None)
    assert STARTS == []  # nothing is computed before it is its turn
    turn(entrant, Train())
    (initial,) = STARTS
    blocks = [turn(entrant, Time(number)).step_ms for number in (1, 2, 3)]
    assert len(set(STARTS[1:])) == 1
    weights, batch = STARTS[1]
    assert weights != initial[0]  # trained
    assert batch == initial[1]  # the first batch again
    finish = Finish(rounds=3, stopped="budget", half_width=0.5, seconds=1.0, race=None)
    with pytest.raises(StopIteration):
        turn(entrant, finish)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "ok"
    assert result["timing"] == vars(finish)
    written = pd.read_csv(tmp_path / "blocks.csv")
    assert written["step_ms"].tolist() == blocks
    assert (written["wall_ms"] >= written["step_ms"]).all()
    assert written["steps"].nunique() == 1
    assert result["step_ms_p50"] == sorted(blocks)[1]
    # Training is recorded once: what is timed afterwards leaves no trace in it.
    assert len(pd.read_csv(tmp_path / "steps.csv")) == 5
    assert STARTS[-1][0] != weights  # the memory pass begins with the initial weights


def test_on_a_gpu_the_workspaces_of_products_join_the_model(monkeypatch):
    task = make_task()
    monkeypatch.setattr(meter, "peak_memory", lambda *_: meter.Peak(900, {}, 1000, 0, workspace_bytes=64))
    monkeypatch.setattr(ops, "lt_workspace_bytes", lambda: 32)
    job = types.SimpleNamespace(make_backend=Fp32, task=task, options={})
    batch = (torch.zeros(2), torch.zeros(2))
    tensors = Fp32.memory_model(task, "fp32", "torch")

    def found(engine):
        setup = types.SimpleNamespace(
            device=torch.device("cuda"), engine=engine, precision="fp32", batches=lambda: iter([batch])
        )
        return train._memory(setup, job)

    plain = found("torch")
    assert plain["memory_model"] == {**tensors, "workspace": {"cuBLAS": 64}}
    assert plain["workspace_bytes"] == 64
    assert plain["peak_memory_bytes_analytic"] == memory.allocated_bytes(tensors) + 64
    native = found("native")
    assert native["memory_model"]["workspace"] == {"cuBLAS": 64, "cublasLt": 32}
    assert native["workspace_bytes"] == 96


def test_steps_are_on_disk_whenever_training_is_left(entrant, tmp_path):
    turn(entrant, None)
    event = entrant.send(Train())
    assert isinstance(event, Progress)
    entrant.close()  # as on Ctrl-C between two steps
    assert not (tmp_path / "steps.csv").exists()


def test_a_step_that_fails_leaves_the_ones_before_it(entrant, tmp_path, monkeypatch):
    left = [1, 2, 3]

    def fails(self):
        left.pop()

    monkeypatch.setattr(Watched, "update", fails)
    turn(entrant, None)
    with pytest.raises(IndexError):
        turn(entrant, Train())
    assert pd.read_csv(tmp_path / "steps.csv")["step"].tolist() == [1, 2, 3]
