"""The count compared with the peak that the memory meter sees in real steps, for networks of four kinds."""

import itertools
from functools import partial

import pytest
import torch
from support.marks import BF16_LSTM, slow_after
from torch import nn

from mpcompare.contract import Stepper
from mpcompare.entrant.memory import first_steps
from mpcompare.footprint.count import KINDS, Batch, count
from mpcompare.footprint.fake import MeasuredKernels
from mpcompare.footprint.recipes import RECIPES
from mpcompare.instruments import meter
from mpcompare.tasks.images import MnistCnn
from mpcompare.tasks.mlp import Mlp
from mpcompare.tasks.optimizers import AdamW, Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt, CharLstm

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("two_threads")
BY_NAME = {recipe.name: recipe for recipe in RECIPES}
# A network, the batch's size, the inputs of a sample.
NETWORKS = {
    "mlp": (partial(Mlp, 784, [1024], 10), 512, Batch((784,), torch.float32)),
    "cnn": (partial(MnistCnn, 16), 64, Batch((1, 28, 28), torch.float32)),
    "lstm": (partial(CharLstm, 96, 128), 32, Batch((32,), torch.int64)),
    "gpt": (partial(CharGpt, 96, 64), 32, Batch((64,), torch.int64)),
}
CASES = dict.fromkeys(
    [
        ("cnn", "plain bf16"),
        *itertools.product(NETWORKS, ["fp32", "amp", "master_weights"]),
        *itertools.product(["cnn", "gpt"], ["plain bf16", "8-bit moments"]),
    ]
)


def measured(recipe, task, batch):
    """The peak of real first steps, the batch included."""
    model = task.new_model(0, CPU)
    x, y = batch.tensors(model, task)
    backends = []

    def run():
        backends.append(first_steps(Stepper(recipe.make(model, task), task.new_rates()), task.micro_batches(x, y)))
        return backends

    return meter.peak_memory(CPU, run).bytes + x.nbytes + y.nbytes


def task_of(network, optimizer, accumulate=1):
    make, batch_size, batch = NETWORKS[network]
    return Task(make, "cross_entropy", optimizer, batch_size, accumulate=accumulate), batch


def marked(case):
    return pytest.param(case, marks=BF16_LSTM, id="-".join(case)) if case[0] == "lstm" and case[1] != "fp32" else case


@pytest.mark.parametrize("case", slow_after(1, map(marked, CASES)), ids="-".join)
def test_count_is_what_is_measured(case):
    network, name = case
    task, batch = task_of(network, AdamW())
    footprint = count(BY_NAME[name], task.new_model(0, CPU), task, batch, MeasuredKernels())
    assert footprint.bytes == pytest.approx(measured(BY_NAME[name], task, batch), rel=0.02)
    assert list(footprint.by_kind) == [kind for kind in KINDS if kind in footprint.by_kind]


@pytest.mark.parametrize("optimizer", slow_after(1, [Sgd(), Sgd(momentum=0.9)]), ids=["sgd", "momentum"])
@pytest.mark.parametrize("name", slow_after(1, ["amp", "fp32", "master_weights"]))
def test_count_of_an_mlp_is_exact(name, optimizer):
    """Products in bf16 take memory of their own on some CPUs. Products in fp32 take none on any."""
    task, batch = task_of("mlp", optimizer)
    without = count(BY_NAME[name], task.new_model(0, CPU), task, batch)
    footprint = count(BY_NAME[name], task.new_model(0, CPU), task, batch, MeasuredKernels())
    assert footprint.bytes == pytest.approx(measured(BY_NAME[name], task, batch), rel=1e-4)
    assert without.bytes == footprint.bytes or (name != "fp32" and without.bytes < footprint.bytes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32", "amp", "master_weights"])
def test_a_mean_of_squares_keeps_its_terms(name):
    """torch's mse_loss on a CPU returns a scalar in the storage of all squares."""
    task = Task(partial(Mlp, 64, [64], 256), "mse", Sgd(), 1024)
    batch = Batch((64,), torch.float32)
    footprint = count(BY_NAME[name], task.new_model(0, CPU), task, batch, MeasuredKernels())
    assert footprint.bytes == pytest.approx(measured(BY_NAME[name], task, batch), rel=0.02)


def test_kernels_that_add_16_bits_to_fp32_are_counted():
    """The sum of the micro-batches' gradients casts them inside of the kernel."""
    task, batch = task_of("mlp", Sgd(), accumulate=2)
    recipe = BY_NAME["master_weights"]
    without = count(recipe, task.new_model(0, CPU), task, batch)
    footprint = count(recipe, task.new_model(0, CPU), task, batch, MeasuredKernels())
    real = measured(recipe, task, batch)
    assert footprint.bytes == pytest.approx(real, rel=0.02)
    assert without.bytes < 0.9 * real


def test_a_batch_norm_of_single_features_is_counted():
    def network():
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    task = Task(network, "cross_entropy", Sgd(), 32)
    footprint = count(BY_NAME["fp32"], task.new_model(0, CPU), task, Batch((8,), torch.float32))
    assert footprint.by_kind["params"] == 4 * (9 * 16 + 2 * 16 + 17 * 4)
    assert footprint.by_kind["buffers"] == 4 * 2 * 16 + 8  # mean, variance, and the count of batches
    assert footprint.by_kind["all gradients"] >= 4 * 32 * 16 > footprint.by_kind["params"]  # those of activations, too


# Without a bf16 kernel an LSTM is computed operation by operation, and states are freed earlier than they are counted.
INFERRED = [pytest.param(name, marks=BF16_LSTM) if name == "lstm" else name for name in NETWORKS]


@pytest.mark.parametrize("network", slow_after(1, INFERRED))
def test_count_of_inference_is_what_is_measured(network):
    task, batch = task_of(network, Sgd())
    recipe = BY_NAME["int8 inference"]
    model = task.new_model(0, CPU)
    with_int8 = recipe.make(model, task)
    x, y = batch.tensors(model, task)
    peak = meter.peak_memory(CPU, lambda: with_int8.train_step([(x, y)], 0.0)).bytes
    kept = sum(t.nbytes for t in (*with_int8.model.parameters(), *with_int8.model.buffers()))
    footprint = count(recipe, model, task, batch, MeasuredKernels())
    assert footprint.bytes == pytest.approx(peak + kept + x.nbytes + y.nbytes, rel=0.02)


@pytest.mark.slow
def test_the_kinds_of_a_step_with_adamw():
    task, batch = task_of("gpt", AdamW())
    params = sum(p.numel() for p in task.new_model(0, CPU).parameters())
    kinds = {r.name: count(r, task.new_model(0, CPU), task, batch).by_kind for r in RECIPES}
    steps = 4 * len(list(task.new_model(0, CPU).parameters()))  # each parameter's count of updates
    for name in ("fp32", "amp", "master_weights"):
        assert kinds[name]["params"] == 4 * params
        assert kinds[name]["optimizer state"] == 8 * params + steps
    assert kinds["plain bf16"]["params"] == 2 * params
    assert kinds["plain bf16"]["optimizer state"] == 4 * params + steps
    assert kinds["8-bit moments"]["optimizer state"] == pytest.approx(2 * params * (1 + 4 / 256), rel=0.05)
    assert {name for name, by_kind in kinds.items() if "cast cache" in by_kind} == {"amp", "8-bit moments"}
    assert {name for name, by_kind in kinds.items() if "compute copies" in by_kind} == {"master_weights"}
