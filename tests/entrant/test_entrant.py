"""One entrant, driven turn by turn as a race does."""

import json
import types
import weakref

import pandas as pd
import pytest
import torch
from support.entrants import AT_START, PLAN, STARTS, Recording, block, turn
from support.plans import replan
from support.tasks import make_batch, make_task

from mpcompare.backends.fp32 import Fp32
from mpcompare.contract import Stepper
from mpcompare.cost import allocated_bytes
from mpcompare.entrant import blocks
from mpcompare.entrant.entrant import compete
from mpcompare.entrant.memory import take
from mpcompare.errors import InputError
from mpcompare.instruments import meter
from mpcompare.loss_scale import NoLossScale
from mpcompare.race.orders import Finish, Progress, Train
from mpcompare.records import RunRecorder
from mpcompare.tasks.data import drawn_batches


@pytest.fixture
def entrant(tmp_path):
    STARTS.clear()
    return compete(PLAN, RunRecorder(tmp_path, AT_START))


@pytest.mark.slow
def test_every_block_times_steps_from_the_trained_weights_on_batches_that_the_race_draws(entrant, tmp_path):
    turn(entrant, None)
    assert STARTS == []  # nothing is computed before it is its turn
    turn(entrant, Train())
    initial, watched = STARTS
    assert watched == initial  # a new backend shows its dtypes
    blocks = [block(entrant, number, seed).step_ms for number, seed in ((1, 7), (2, 8), (3, 7))]
    assert len({weights for weights, _ in STARTS[2:]}) == 1
    weights = STARTS[2][0]
    assert weights != initial[0]  # trained
    first = [next(drawn_batches(PLAN.dataset(), PLAN.task.batch_size, seed))[0].sum().item() for seed in (7, 8, 7)]
    assert [batch for _, batch in STARTS[2:]] == first
    finish = Finish(rounds=3, stopped="budget", half_width=0.5, seconds=1.0, race=None, compared=1)
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


def test_the_trained_backend_is_gone_before_a_block_is_timed(tmp_path):
    made = []

    class Kept(Recording):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(weakref.ref(self))

    entrant = compete(replan(PLAN, make_backend=Kept), RunRecorder(tmp_path, AT_START))
    turn(entrant, None)
    turn(entrant, Train())
    assert len(made) == 3  # backends that say the engine, are trained, and show the dtypes
    assert [backend() for backend in made] == [None] * 3


def test_a_pass_that_fails_leaves_the_record_of_those_before_it(entrant, tmp_path, monkeypatch):
    def fails(_):
        raise ZeroDivisionError

    monkeypatch.setattr("mpcompare.entrant.memory.take", fails)
    for order in (None, Train()):
        turn(entrant, order)
    block(entrant, 1, seed=1)
    with pytest.raises(ZeroDivisionError):
        turn(entrant, Finish(rounds=1, stopped="budget", half_width=0.5, seconds=1.0, race=None, compared=1))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "running"  # the caller replaces this status
    assert {"engine", "device_name", "final_loss", "module_dtypes", "step_ms_p50", "phase_ms"} <= set(result)
    assert not {"memory_model", "inference", "resumed_from", "examine_s"} & set(result)


PEAK = meter.Peak(900, {}, 1000, 0, workspace_bytes=64)


def test_on_a_gpu_the_workspaces_of_products_join_the_model(monkeypatch):
    task = make_task()
    monkeypatch.setattr(meter, "peak_memory", lambda _, run: run() and PEAK)
    batch = make_batch(task, torch.device("cpu"))
    backend = Fp32(task.new_model(0, torch.device("cpu")), task, "fp32", NoLossScale())
    tensors = backend.memory_model()

    def found():
        setup = types.SimpleNamespace(
            device=torch.device("cuda"),
            new_stepper=lambda: Stepper(backend, task.new_rates()),
            batches=lambda: iter([[batch]]),
        )
        return take(types.SimpleNamespace(setup=setup))

    plain = found()
    assert plain.memory_model == {**tensors, "workspace": {"cuBLAS": 64}}
    assert plain.workspace_bytes == 64
    assert plain.peak_memory_bytes_analytic == allocated_bytes(tensors) + 64
    backend.workspaces = lambda: {"cublasLt": 32}
    with_its_own = found()
    assert with_its_own.memory_model["workspace"] == {"cuBLAS": 64, "cublasLt": 32}
    assert with_its_own.workspace_bytes == 96


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

    monkeypatch.setattr(Recording, "update", fails)
    turn(entrant, None)
    with pytest.raises(IndexError):
        turn(entrant, Train())
    assert pd.read_csv(tmp_path / "steps.csv")["step"].tolist() == [1, 2, 3]


class HalfTheRowsOnceLoaded(Fp32):
    """``fp32`` that takes half of the rows once it was given a state, as in timed blocks."""

    loaded = False

    def forward(self, x, y):
        rows = len(x) // 2 if self.loaded else len(x)
        return super().forward(x[:rows], y[:rows])

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = True


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "same"), [(Recording, True), (HalfTheRowsOnceLoaded, False)])
def test_a_block_is_beside_that_of_the_trained_backend(tmp_path, cls, same):
    entrant = compete(replan(PLAN, make_backend=cls, verdict={"enabled": True}), RunRecorder(tmp_path, AT_START))
    for order in (None, Train()):
        turn(entrant, order)
    for number in (1, 2):
        block(entrant, number, seed=number)
    with pytest.raises(StopIteration):
        turn(entrant, Finish(rounds=2, stopped="budget", half_width=0.5, seconds=1.0, race=None, compared=1))
    result = json.loads((tmp_path / "result.json").read_text())
    assert 0 < result["timed_loss"] < 3
    assert (result["timed_loss_difference"] == 0) == same
    weights = result["timed_state"]["weights"]
    assert (weights["difference"] == 0) == same
    assert 0 < weights["moved"] < weights["norm"]
    blocks = pd.read_csv(tmp_path / "blocks.csv")
    assert result["timed_steps"] > blocks["steps"].iloc[-1]
    assert blocks["finished"].all()
    assert result["timed_unfinished"] == 0
    assert (blocks["read_ms"] > 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"softmax": "fp16"}}, "backend.softmax=fp16: backend=fp32 takes no options"),
        (
            {"load_data": lambda seed: (torch.zeros(2), torch.zeros(2))},
            "data._target_=<lambda>: expected a Dataset, or",
        ),
        ({"seed": 2**32}, "seed=4294967296: expected a whole number of at least 0 and at most 4294967295"),
        ({"train": {"steps": 0}}, "train.steps=0: expected a whole number of at least 1"),
        ({"verdict": {"noise": -1}}, "verdict.noise=-1: expected a whole number of at least 0"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_one_line(change, message):
    with pytest.raises(InputError) as said:
        replan(PLAN, **change).dataset()
    assert str(said.value).startswith(message)


def test_a_precision_that_the_backend_lacks_ends_a_run_before_any_of_its_race_trains(tmp_path):
    refused = compete(replan(PLAN, precision="bf16"), RunRecorder(tmp_path, AT_START))
    with pytest.raises(InputError, match="precision=bf16: backend=fp32 accepts one of auto, fp32"):
        turn(refused, None)


def test_training_of_one_step_says_so():
    part = types.SimpleNamespace
    setup = part(record=part(engine="torch"), dataset=part(name="digits"))
    entrant = part(setup=setup, trained=part(rows=[{"loss": 2.0, "step_ms": 1.5}]))
    said = "torch, digits, 1 step, loss 2.0000, first step 1.5 ms, last 1.5 ms"
    assert blocks._describe_training(entrant) == said
