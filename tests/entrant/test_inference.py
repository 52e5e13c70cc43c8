"""Inference with the trained network: the accuracy and the costs of each way, and ways that cannot be had."""

import copy
import json
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from rich.console import Console
from support.entrants import AT_START, PLAN, block, turn
from support.marks import CUDA
from support.plans import replan
from support.records import write_run
from support.tasks import make_task
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.fp32 import Fp32
from mpcompare.backends.torch_model import has_kernel
from mpcompare.contract import Stepper
from mpcompare.dtypes import torch_dtype
from mpcompare.entrant import inference
from mpcompare.entrant.entrant import compete
from mpcompare.entrant.evaluation import evaluate, score
from mpcompare.entrant.inference import Way, autocast, cast_weights, take, time_batches, ways
from mpcompare.entrant.plan import Inference
from mpcompare.entrant.setup import set_up
from mpcompare.errors import InputError
from mpcompare.instruments.clock import CpuClock
from mpcompare.precision import BF16, FORMATS, PRECISIONS
from mpcompare.race.orders import Finish, Train
from mpcompare.records import RunRecorder
from mpcompare.report.comparison import compare
from mpcompare.report.outputs.console import inference_tables
from mpcompare.report.report import report
from mpcompare.report.runs import find_runs
from mpcompare.shared import ALONE, Shared
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.mlp import Mlp
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task

CPU = torch.device("cpu")
PLAN = replan(PLAN, make_backend=Amp, backend="amp", load_data=partial(digits, samples=960),
              inference={"enabled": True, "budget_s": 0.01})  # fmt: skip


class Trained:
    """A setup, and the state after some steps."""

    def __init__(self, folder, steps=20, shared=ALONE, **changes):
        folder.mkdir()
        self.setup = set_up(replan(PLAN, **changes), ALONE)
        stepper = self.setup.new_stepper()
        for batch in islice(self.setup.batches(), steps):
            stepper.step(batch)
        self.state = copy.deepcopy(stepper.backend.state_dict())
        self.shared = shared
        self.scores = evaluate(
            self.setup.model, self.state["params"], self.state["buffers"], self.setup.dataset, self.setup.task
        )

    def measure(self, budget_s=0.01, batch_size=None):
        plan = SimpleNamespace(inference=Inference(True, budget_s, batch_size))
        trained = SimpleNamespace(state=lambda: self.state, scores=self.scores)
        return take(SimpleNamespace(plan=plan, setup=self.setup, trained=trained, shared=self.shared))["inference"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("bits", ["bf16", "fp16"])
def test_each_way_is_as_exact_as_its_rounding_and_fp32_as_evaluating(tmp_path, device, bits):
    trained = Trained(tmp_path / "0", steps=200, device=device, precision=bits)
    setup = trained.setup
    found = trained.measure()["ways"]
    assert list(found) == [f"autocast {bits}", f"{bits} weights", "fp32"]
    network = inference.with_values(setup.model, trained.state["params"], trained.state["buffers"]).eval()
    plain = ways(bits, setup.device)["fp32"](network)
    assert score(plain, setup.dataset, setup.task) == trained.scores  # bit for bit
    assert {key: found["fp32"][key] for key in trained.scores} == trained.scores

    x, y = setup.dataset.x_test, setup.dataset.y_test
    exact = plain(x)
    assert 0.5 < trained.scores["test_accuracy"] < 1  # else the checks below would say nothing
    # Inputs and weights of 3 layers, and each result, are rounded. So many relative errors are allowed, of the size of
    # the terms of the sums, without their signs.
    size = x.flatten(1).abs()
    for layer in (m for m in network.modules() if isinstance(m, nn.Linear)):
        size = size @ layer.weight.detach().abs().T + layer.bias.detach().abs()
    bound = 9 * PRECISIONS[bits].unit_roundoff * size.max().item()
    best, second = exact.topk(2, dim=1).values.unbind(1)
    unsure = ((best - second) < 2 * bound).float().mean().item()
    for name, make in (("autocast", autocast), ("weights", cast_weights)):
        (way,) = (row for key, row in found.items() if name in key)
        output = make(network, torch_dtype(FORMATS[bits]))(x)
        assert output.dtype == torch_dtype(FORMATS[bits])
        assert (output.float() - exact).abs().max().item() < bound
        assert abs(way["test_accuracy"] - trained.scores["test_accuracy"]) <= unsure
        assert way["test_accuracy"] == (output.argmax(1) == y).float().mean().item() or unsure > 0
        assert way["test_loss"] == pytest.approx(trained.scores["test_loss"], abs=2 * bound)
        assert way["test_loss"] != trained.scores["test_loss"]  # another arithmetic was used


def test_what_is_counted_of_memory(tmp_path):
    trained = Trained(tmp_path / "0", task=make_task(in_features=784, hidden=[64], out_features=10))
    found = trained.measure(batch_size=16)["ways"]
    numbers = 784 * 64 + 64 + 64 * 10 + 10
    assert found["fp32"]["weight_bytes"] == found["autocast bf16"]["weight_bytes"] == 4 * numbers
    assert found["bf16 weights"]["weight_bytes"] == 2 * numbers
    x = 4 * 16 * 784
    for row in found.values():
        assert row["peak_memory_bytes"] >= row["weight_bytes"] + x + 2 * 16 * 64
    # autocast casts at least the first layer's weights. The casts live at the same time as the fp32 weights.
    assert found["autocast bf16"]["peak_memory_bytes"] >= 4 * numbers + x + 2 * 784 * 64
    assert found["fp32"]["peak_memory_bytes"] < 4 * numbers + x + 2 * 784 * 64


def test_norms_stay_in_fp32_and_the_network_that_was_cast_is_a_copy():
    network = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    before = copy.deepcopy(network.state_dict())
    way = cast_weights(network, torch.bfloat16)
    assert [p.dtype for p in way.network.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2 + [
        torch.bfloat16
    ] * 2
    assert way(torch.ones(3, 8)).dtype == torch.bfloat16
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert network(torch.ones(3, 8)).dtype == torch.float32  # the network got no hooks


def test_the_ways_of_a_precision():
    assert list(ways("bf16", CPU)) == ["autocast bf16", "bf16 weights", "fp32"]
    assert list(ways("fp32", CPU)) == ["autocast bf16", "bf16 weights", "fp32"]
    gpu = torch.device("cuda")
    assert list(ways("fp32", gpu)) == ["autocast fp16", "fp16 weights", "fp32"]
    tf32 = {name: make for name, make in ways("tf32", gpu).items() if "16" not in name}
    assert {name: make(nn.Linear(1, 1)).tf32 for name, make in tf32.items()} == {"fp32": False, "tf32": True}


@pytest.mark.parametrize(("budget_s", "batches"), [(1e-9, 3), (0.2, None)])
def test_the_ways_take_turns_until_the_budget_is_spent(budget_s, batches):
    calls = []

    def way(name):
        return Way(lambda x: calls.append(name) or x, nn.Identity())

    x = torch.zeros(1)
    times = time_batches({name: way(name) for name in "abc"}, x, CpuClock(), budget_s)
    number = len(times["a"])
    assert number == batches if batches else number > 3
    assert {len(ms) for ms in times.values()} == {number}
    assert len(calls) == 3 * number  # there is one call for each timed batch, and no other
    rounds = ["".join(calls[first : first + 3]) for first in range(0, len(calls), 3)]
    assert rounds[:4] == ["abc", "bca", "cab", "abc"][: len(rounds)]
    assert all(set(one) == set("abc") and one != other for one, other in pairwise(rounds))
    assert all(ms >= 0 for ms in times["a"])


def test_without_any_way_there_is_nothing_to_time():
    assert time_batches({}, torch.zeros(1), CpuClock(), 1.0) == {}


class OnlyFp32(nn.Module):
    """A network that calls torch's operator of a matrix product by itself: only autocast casts its operands."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(784, 8), nn.Linear(8, 10)
        self.table = torch.eye(8)

    def forward(self, x):
        return self.last(torch.ops.aten.mm.default(self.first(x.flatten(1)), self.table))


def test_a_way_that_cannot_be_had_is_a_reason_and_the_others_go_on(tmp_path):
    found = Trained(tmp_path / "0", task=Task(OnlyFp32, "cross_entropy", Sgd(0.1), 32)).measure()["ways"]
    assert list(found) == ["autocast bf16", "bf16 weights", "fp32"]
    (reason,) = found["bf16 weights"].values()
    assert reason.startswith("RuntimeError: ")
    assert "\n" not in reason
    assert found["autocast bf16"]["latency_ms"] > 0
    assert found["fp32"]["latency_ms"] > 0


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(28, 8, batch_first=True), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(self.lstm(x.reshape(len(x), 28, 28))[0][:, -1])


@pytest.mark.slow
def test_recurrent_layers_in_fp16_on_a_cpu_are_measured_where_it_has_them_and_end_nothing(tmp_path, monkeypatch):
    task = Task(Recurrent, "cross_entropy", Sgd(0.1), 32)
    trained = Trained(tmp_path / "0", task=task, make_backend=Fp32, precision="fp32", steps=1)
    unavailable = [name for name, row in trained.measure()["ways"].items() if "unavailable" in row]
    assert unavailable == ([] if has_kernel(nn.LSTM, BF16) else ["autocast bf16"])
    monkeypatch.setattr(inference, "ways", lambda *_: ways("fp16", CPU))
    found = trained.measure()["ways"]
    assert list(found) == ["autocast fp16", "fp16 weights", "fp32"]
    assert all(("latency_ms" in row) != ("unavailable" in row) for row in found.values())
    assert found["fp32"]["latency_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("asked_for", "rows"), [(None, 16), (7, 7), (2000, 2000)])
def test_a_batch_has_the_rows_of_a_micro_batch_or_those_asked_for(tmp_path, monkeypatch, asked_for, rows):
    task = replace(PLAN.task, accumulate=2)
    trained = Trained(tmp_path / "0", task=task, steps=1)
    assert len(trained.setup.dataset.x_train) < 2000
    seen = []
    monkeypatch.setattr(
        inference, "time_batches", lambda made, x, *_: seen.append(len(x)) or {name: [2.0] for name in made}
    )
    found = trained.measure(batch_size=asked_for)
    assert (found["batch_size"], seen) == (rows, [rows])
    assert found["ways"]["fp32"]["samples_per_s"] == rows / 2e-3


@pytest.mark.slow
def test_entrants_of_a_race_share_what_it_costs_and_say_how_exact_their_own_weights_are(tmp_path):
    shared = Shared(tmp_path)
    (tmp_path / "race").mkdir()
    first = Trained(tmp_path / "race" / "0", shared=shared).measure()["ways"]
    second = Trained(tmp_path / "race" / "1", steps=1, shared=shared, make_backend=Fp32, precision="fp32").measure()
    for name, row in second["ways"].items():
        for key in ("latency_ms", "peak_memory_bytes", "weight_bytes"):
            assert row[key] == first[name][key]
        assert row["test_accuracy"] < first[name]["test_accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_measured_in_the_last_turn_of_the_entrant(tmp_path, enabled):
    turns = compete(replan(PLAN, inference={"enabled": enabled}), RunRecorder(tmp_path, AT_START))
    for order in (None, Train()):
        turn(turns, order)
    block(turns, 1, seed=1)
    assert "inference" not in json.loads((tmp_path / "result.json").read_text())
    with pytest.raises(StopIteration):
        turn(turns, Finish(rounds=1, stopped="budget", half_width=0.5, seconds=1.0, race=None, compared=1))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "ok"
    assert ("inference" in result) == enabled
    if enabled:
        found = result["inference"]
        assert found["batches"] >= inference.MIN_BATCHES
        assert found["ways"]["fp32"]["test_accuracy"] == result["test_accuracy"]
        assert all(
            row["latency_ms_p20"] <= row["latency_ms"] <= row["latency_ms_p80"] for row in found["ways"].values()
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enabled": "yes"}, "inference.enabled=yes: expected true or false"),
        ({"budget_s": 0}, "inference.budget_s=0: expected a finite number above 0"),
        ({"batch_size": 0}, "inference.batch_size=0: expected a whole number of at least 1, or null"),
    ],
)
def test_what_cannot_be_done_is_one_line(change, message):
    with pytest.raises(InputError) as said:
        replan(PLAN, inference=change)
    assert str(said.value) == message


def row(ms, accuracy=0.5):
    return {"test_loss": 1.25, "test_accuracy": accuracy, "latency_ms": ms, "latency_ms_p20": ms - 1,
            "latency_ms_p80": ms + 1, "samples_per_s": 8e3 / ms, "weight_bytes": 4_000_000,
            "peak_memory_bytes": 6_000_000}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_table_has_a_row_for_each_way_of_each_run(tmp_path, capsys):
    found = {"autocast fp16": row(4.0, 0.25), "fp16 weights": {"unavailable": "RuntimeError: no"}, "fp32": row(8.0)}
    more = {"inference": {"batch_size": 8, "seconds": 1.0, "batches": 3, "ways": found}}
    write_run(tmp_path / "0", "amp", **more)
    write_run(tmp_path / "1", "mine", **more)
    write_run(tmp_path / "2", "older")  # a record without inference
    assert report([tmp_path], tmp_path / "report", formats=[])
    out = capsys.readouterr().out
    assert "inference, batch 8" in out
    assert out.count("unavailable: RuntimeError: no") == 2
    assert "a race measures them once" in out
    written = pd.read_csv(tmp_path / "report" / "inference.csv")
    assert written["label"].tolist() == ["amp bf16"] * 3 + ["mine bf16"] * 3
    assert written["way"].tolist() == list(found) * 2
    assert written["time_vs_fp32"].tolist()[:1] == [0.5]
    assert written["test_accuracy"].isna().tolist() == [False, True, False] * 2
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    (table,) = inference_tables(comparison, width=200)
    console.print(table)
    (line,) = (line for line in console.export_text(clear=False).splitlines() if line.lstrip().startswith("amp"))
    assert " ".join(line.split()) == "amp bf16 autocast fp16 0.2500 1.25000 4 3 - 5 0.50 2000 6 4"
    (line,) = (line for line in console.export_text(clear=False).splitlines() if line.lstrip().startswith("mine"))
    assert " ".join(line.split()) == "mine bf16 autocast fp16 0.2500 1.25000"  # its costs stand in the rows above


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_no_run_without_inference_has_a_table(tmp_path, capsys):
    write_run(tmp_path / "0", "amp")
    assert report([tmp_path], tmp_path / "report", formats=[])
    assert "inference, batch" not in capsys.readouterr().out
    assert not (tmp_path / "report" / "inference.csv").exists()


def test_the_last_step_of_a_stepper_is_not_needed(tmp_path):
    """The networks are made from the state alone, because the backend is gone by then."""
    trained = Trained(tmp_path / "0", steps=1, task=Task(partial(Mlp, 784, [16], 10), "cross_entropy", Sgd(0.1), 32))
    assert isinstance(trained.setup.new_stepper(), Stepper)
    del trained.state["optimizer"], trained.state["loss_scale"]
    assert len(trained.measure()["ways"]) == 3
