"""The first calls that people write: each composes what they mean, or says in one line and at once what to write."""

import functools
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from support.trees import HalvesGradients
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import mpcompare
from mpcompare.api import optimizers
from mpcompare.api.compare import Arguments, overrides_of
from mpcompare.api.objects import Objects
from mpcompare.backends.amp import Amp
from mpcompare.command import nodes
from mpcompare.errors import InputError
from mpcompare.paths import CONF

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(640, 12, generator=GENERATOR)
Y = X[:, :3].argmax(dim=1)
SMALL = {"device": "cpu", "measure": {"budget_s": 0.2, "block_s": 0.01}, "inference": {"enabled": False}}


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.hidden, self.output = nn.Linear(12, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.output(torch.tanh(self.hidden(x)))


class Wide(Net):
    def __init__(self, width):
        super().__init__(width)


class SignSgd(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-group["lr"])


class Bounded(SignSgd):
    def __init__(self, params, lr=0.1, bound=1.0):
        super().__init__(params, lr)
        self.bound = bound


class Samples(Dataset):
    def __len__(self):
        return 600

    def __getitem__(self, row):
        return X[row].numpy(), int(Y[row])


class Words(Dataset):
    """Samples as Hugging Face has them: dicts, a text among the numbers."""

    def __len__(self):
        return 64

    def __getitem__(self, row):
        return {"input_ids": torch.arange(5) + row, "labels": row % 2, "text": "a word"}


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.output = nn.Embedding(80, 4), nn.Linear(4, 2)

    def forward(self, input_ids, labels=None):
        logits = self.output(self.words(input_ids).mean(1))
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}


def my_step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def my_halving_step(model, optimizer, batch, scaler):
    x, y = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def fused(model, optimizer, batch):
    return my_step(model, optimizer, batch)


SCALER = torch.amp.GradScaler("cpu")


def step_with_a_scaler_of_its_own(model, optimizer, batch):
    SCALER.scale(model(batch[0]).sum()).backward()


def composed(tmp_path: Path, **arguments: Any) -> tuple[list[str], Objects]:
    known = {
        name: arguments.pop(name, None) for name in Arguments.__dataclass_fields__ if name not in ("knobs", "backends")
    }
    backends = arguments.pop("backends", [])
    objects = Objects()
    call = Arguments(**known, backends=backends if isinstance(backends, list) else [backends], knobs=arguments)
    return overrides_of(call, objects, tmp_path / "conf"), objects


LOADER = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
WORKS = {
    "a module and a loader": ({"model": Net(), "data": LOADER}, ["++task.batch_size=32", "data=function"]),
    "a class and tensors": ({"model": Net, "data": (X, Y), "batch_size": 64}, ["++task.batch_size=64"]),
    "a lambda and arrays": ({"model": lambda: Net(4), "data": (X.numpy(), Y.numpy())}, ["task=module"]),
    "a partial and a data set": ({"model": functools.partial(Wide, 4), "data": Samples()}, ["data=function"]),
    "two loaders": ({"model": Net, "data": (LOADER, LOADER)}, ["++task.batch_size=32"]),
    "two data sets": ({"model": Net, "data": [Samples(), Samples()]}, ["data=function"]),
    "an iterator of batches": ({"model": Net, "data": iter(LOADER), "batch_size": 32}, ["data=function"]),
    "a list of samples": ({"model": Net, "data": list(TensorDataset(X, Y)), "batch_size": 32}, ["data=function"]),
    "four arrays": ({"model": Net, "data": (X.numpy(), Y.numpy(), X[:9], Y[:9])}, ["data=function"]),
    "a data set of dicts with labels": ({"model": Labelled, "data": Words(), "batch_size": 8}, ["++task.loss='model'"]),
    "an autoencoder": ({"model": nn.Linear(12, 12), "data": X, "loss": "mse"}, ["++task.loss='mse'"]),
    "a class of losses": ({"model": Net, "data": (X, Y), "loss": nn.CrossEntropyLoss}, ["CrossEntropyLoss"]),
    "a loss with arguments": ({"model": Net, "data": (X, Y), "loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, []),
    "a function of torch": ({"model": Net, "data": (X, Y), "loss": nn.functional.cross_entropy}, ["cross_entropy"]),
    "AdamW": ({"optimizer": torch.optim.AdamW, "lr": 3e-4}, ["optimizer=adamw", "++task.optimizer.lr=0.0003"]),
    "a word": ({"optimizer": "AdamW"}, ["optimizer=adamw"]),
    "SGD with momentum": (
        {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)},
        ["optimizer=sgd", "++task.optimizer.lr=0.1", "++task.optimizer.momentum=0.9"],
    ),
    "RAdam": (
        {"optimizer": torch.optim.RAdam},
        ["optimizer=torch", "++task.optimizer._target_='torch.optim.radam.RAdam'", "++task.optimizer.lr=0.001"],
    ),
    "amsgrad": (
        {"optimizer": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True)},
        ["optimizer=torch", "++task.optimizer.lr=0.1", "++task.optimizer.amsgrad=true"],
    ),
    "a partial optimizer of one's own": (
        {"optimizer": functools.partial(Bounded, bound=5.0)},
        ["optimizer=torch", "++task.optimizer.lr=0.1", "++task.optimizer.bound=5.0"],
    ),
    "an optimizer of one's own": (
        {"optimizer": lambda params: SignSgd(params, lr=0.01)},
        ["optimizer=torch", "SignSgd'"],
    ),
    "a partial optimizer": (
        {"optimizer": functools.partial(torch.optim.Adam, betas=(0.9, 0.95))}, ["++task.optimizer.betas=[0.9,0.95]"],
    ),
    "dtypes": ({"precision": [torch.bfloat16, torch.float16]}, ["precision=bf16,fp16"]),
    "bf16 and fp32": ({"precision": torch.bfloat16, "backends": ["amp", "fp32"], "device": "cpu"}, ["precision=auto"]),
    "a function is a backend": ({"backends": ["amp", my_step]}, ["backend=amp,my_step"]),
    "a class is a backend": ({"backends": [Amp, HalvesGradients]}, ["backend=Amp,HalvesGradients"]),
    "steps": ({"steps": 20}, ["++train.steps=20"]),
    "numbers of numpy": (
        {"lr": np.float32(0.25), "steps": np.int64(5), "batch_size": np.int32(8), "seed": np.int64(3)},
        ["++task.optimizer.lr=0.25", "++train.steps=5", "++task.batch_size=8", "seed=3"],
    ),
    "numbers of numpy in tables": (
        {"train": {"steps": np.int64(5)}, "optimizer": lambda params: torch.optim.SGD(params, lr=np.float64(1e-3))},
        ["train.steps=5", "++task.optimizer.lr=0.001"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
def test_what_people_write_is_composed(name, tmp_path):
    arguments, expected = WORKS[name]
    overrides, _ = composed(tmp_path, **dict(arguments))
    for each in expected:
        assert any(each in override for override in overrides), overrides


def test_groups_of_an_optimizer_are_known_by_the_names_of_their_parameters(tmp_path):
    net = Net()
    groups = [{"params": net.hidden.parameters()}, {"params": net.output.parameters(), "lr": 0.2, "weight_decay": 0.0}]
    overrides, _ = composed(tmp_path, model=net, data=(X, Y), optimizer=torch.optim.AdamW(groups, lr=0.1))
    assert ("++task.optimizer.groups=[{match: ['output.weight','output.bias'],lr_factor: 2.0,weight_decay: 0.0}]"
            in overrides)  # fmt: skip


def test_a_module_begins_with_the_weights_that_it_has_and_stays_as_it_is(tmp_path):
    net = Net()
    before = net.hidden.weight.detach().clone()
    _, objects = composed(tmp_path, model=net, data=(X, Y))
    made = objects.carried["Net"]()
    assert torch.equal(made.hidden.weight, before)
    with torch.no_grad():
        made.hidden.weight.zero_()
    assert torch.equal(net.hidden.weight, before)
    assert torch.equal(objects.carried["Net"]().hidden.weight, before)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda a, b: torch.optim.RMSprop([{"params": a}, {"params": b, "alpha": 0.5}], lr=0.1), "alpha=0.5"),
        (lambda a, b: torch.optim.Adam([{"params": a}, {"params": b, "amsgrad": True}], lr=0.1), "amsgrad=True"),
    ],
)
def test_groups_differ_in_rate_and_decay_only(make, said, tmp_path):
    net = Net()
    optimizer = make([*net.hidden.parameters()], [*net.output.parameters()])
    with pytest.raises(InputError, match=f"optimizer: {said}: expected .* in all groups"):
        composed(tmp_path, model=net, data=(X, Y), optimizer=optimizer)


def test_an_optimizer_over_a_part_of_the_network_is_refused_unless_the_rest_is_frozen(tmp_path):
    net = Net()
    for optimizer in (torch.optim.AdamW(net.output.parameters()), lambda params: torch.optim.AdamW([*params][2:])):
        with pytest.raises(InputError, match=r"^optimizer=AdamW: leaves hidden.weight of the model out: expected all"):
            optimizers.read(optimizer, net, Objects())
    net.hidden.requires_grad_(False)
    overrides, _ = composed(tmp_path, model=net, data=(X, Y), optimizer=torch.optim.AdamW(net.output.parameters()))
    assert "optimizer=adamw" in overrides


def warming_up(make, net):
    optimizer = make([{"params": net.hidden.parameters()}, {"params": net.output.parameters(), "lr": 0.2}])
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10).optimizer


def test_the_rate_is_the_one_before_a_scheduler_has_changed_it(tmp_path):
    net = Net()
    one = torch.optim.AdamW(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(one, start_factor=1 / 3)
    overrides, _ = composed(tmp_path / "one", model=net, data=(X, Y), optimizer=one)
    assert "++task.optimizer.lr=0.1" in overrides
    two = warming_up(functools.partial(torch.optim.SGD, lr=0.1), net)
    assert two.param_groups[0]["lr"] == 0
    overrides, _ = composed(tmp_path / "two", model=net, data=(X, Y), optimizer=two)
    assert "++task.optimizer.lr=0.1" in overrides
    assert any("lr_factor: 2.0" in each for each in overrides)
    none = warming_up(functools.partial(torch.optim.SGD, lr=0.0), net)
    with pytest.raises(InputError, match=r"^optimizer: lr=0.0: expected a rate above 0 in the first group$"):
        composed(tmp_path / "none", model=net, data=(X, Y), optimizer=none)


def test_groups_of_an_optimizer_without_a_decay_have_none(tmp_path):
    net = Net()
    groups = [{"params": net.hidden.parameters()}, {"params": net.output.parameters(), "lr": 0.2}]
    overrides, _ = composed(tmp_path, model=net, data=(X, Y), optimizer=torch.optim.Rprop(groups, lr=0.1))
    assert "++task.optimizer.groups=[{match: ['output.weight','output.bias'],lr_factor: 2.0}]" in overrides


def test_as_many_samples_are_read_as_the_steps_need_and_the_last_are_held_out(tmp_path):
    read = []

    def batches():
        for number in range(1000):
            read.append(number)
            yield X[:10], Y[:10]

    _, objects = composed(tmp_path, model=Net, data=batches(), batch_size=10, steps=5)
    x_train, y_train, x_test, y_test = objects.carried["in_memory"](0)
    assert len(read) == 9  # 5 steps and 3 of warm-up, and one batch more that is held out
    assert [len(each) for each in (x_train, y_train, x_test, y_test)] == [80, 80, 10, 10]


@pytest.mark.parametrize("four", [False, True])
def test_arrays_are_taken_in_torchs_own_types(four, tmp_path):
    x, y = X.double().numpy()[::-1], Y.int().numpy().astype(">i4")
    data = (x, y, x[:9], y[:9]) if four else (x, y)
    _, objects = composed(tmp_path, model=Net, data=data, batch_size=32)
    x_train, y_train, _, y_test = objects.carried["in_memory"](0)
    assert torch.equal(x_train[:9], X.flip(0)[:9])
    assert (y_train.dtype, y_test.dtype) == (torch.int64, torch.int64)
    assert torch.equal(y_train[:9], Y[:9])


def test_arrays_of_a_dict_are_taken_in_torchs_own_types(tmp_path):
    data = {"input_ids": np.ones((64, 5), np.int32), "labels": np.zeros(64, np.int32)}
    _, objects = composed(tmp_path, model=Labelled, data=data, batch_size=8)
    x_train, y_train, _, _ = objects.carried["in_memory"](0)
    assert {name: each.dtype for name, each in x_train.items()} == {"input_ids": torch.int32, "labels": torch.int64}
    assert y_train["labels"].data_ptr() == x_train["labels"].data_ptr()


def test_a_loader_of_a_data_set_without_samples_by_number_is_read(tmp_path):
    class Stream(IterableDataset):
        def __len__(self):
            return 640

        def __iter__(self):
            return iter(TensorDataset(X, Y))

    overrides, _ = composed(tmp_path, model=Net, data=DataLoader(Stream(), batch_size=32))
    assert "++task.batch_size=32" in overrides


@pytest.mark.parametrize("knobs", [{"task": {"loss": "mse"}}, {"task.loss": "mse"}])
def test_the_loss_may_be_set_as_on_the_command_line(knobs, tmp_path):
    overrides, _ = composed(tmp_path, model=nn.Linear(12, 12), data=(X, X), batch_size=8, **knobs)
    assert overrides[-1] == "task.loss=mse"
    assert not any("++task.loss" in each for each in overrides)


def test_a_loss_that_is_set_takes_its_targets_of_a_dict(tmp_path):
    overrides, objects = composed(tmp_path, data=Words(), batch_size=8, task={"loss": "cross_entropy"})
    x_train, y_train, _, _ = objects.carried["in_memory"](0)
    assert (list(x_train), y_train.shape) == (["input_ids"], (57,))
    assert overrides[-1] == "task.loss=cross_entropy"


@pytest.mark.parametrize(
    ("knobs", "training", "held_out"),
    [
        ({"train": {"steps": "50"}, "task": {"batch_size": "10"}, "model": Net}, 530, 66),  # and 3 steps of warm-up
        ({"train": {"warmup_steps": 7}, "steps": 5, "batch_size": 64, "model": Net}, 12 * 64, 96),
        ({"model": Net}, 23 * 256, 736),
        ({"task": "recipe_mlp"}, 23 * 512, 1472),
        ({}, 13334, 1666),  # the batch of mnist_mlp is 8192: these are all
    ],
)
def test_as_many_samples_are_carried_as_the_task_needs(knobs, training, held_out, tmp_path):
    data = (torch.zeros(1, 12).expand(15000, 12), torch.zeros(1, dtype=torch.int64).expand(15000))
    _, objects = composed(tmp_path, data=TensorDataset(*data), **knobs)
    x_train, _, x_test, _ = objects.carried["in_memory"](0)
    assert (len(x_train), len(x_test)) == (training, held_out)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"experiment": "clipping"}, "clip_norm: 0.5"),
        ({"+experiment": "clipping"}, "clip_norm: 0.5"),
        ({"ablation": "no_loss_scale"}, "mpcompare.loss_scale.NoLossScale"),
    ],
)
def test_an_experiment_and_an_ablation_are_chosen_with_and_without_a_plus(knobs, said, tmp_path):
    overrides, _ = composed(tmp_path, **knobs)
    assert said in OmegaConf.to_yaml(nodes.composed(overrides))


REFUSED = {
    "a name": ({"model": "resnet18"}, "model=resnet18: expected a module, its class, or a function"),
    "arguments": ({"model": Wide}, "model=Wide: missing a required argument: 'width': write model=lambda: Wide(...)"),
    "a module without numbers": (
        {"model": nn.Linear(12, 3, device="meta"), "data": (X, Y)}, "model=Linear: weight is on the device meta",
    ),
    "a loss": ({"loss": "nll"}, "loss=nll: expected one of cross_entropy, masked_cross_entropy, mse, model"),
    "an optimizer": ({"optimizer": torch.optim.Adafactor}, "optimizer=Adafactor: its update of an element depends on"),
    "a hidden argument": (
        {"optimizer": lambda params: Bounded(params, lr=0.1, bound=5.0)},
        "optimizer: bound=Bounded: cannot be read from it: expected functools.partial(Bounded, ...)",
    ),
    "a search": ({"optimizer": torch.optim.LBFGS}, "optimizer=LBFGS: cannot update a parameter by its gradient alone"),
    "two optimizers": (
        {"optimizer": [torch.optim.SGD, torch.optim.Adam]}, "optimizer=2 optimizers: expected one: networks with",
    ),
    "a parametrized module": (
        {"model": nn.utils.parametrizations.spectral_norm(nn.Linear(12, 3)), "data": (X, Y), "batch_size": 8},
        "ParametrizedLinear=function: cannot be carried into the processes of a race (RuntimeError: Serialization",
    ),
    "epochs": ({"epochs": 3}, "epochs=3: is no argument"),
    "a compiled module": ({"model": torch.compile(Net()), "data": (X, Y)}, "model=OptimizedModule: is compiled: give"),
    "a word": ({"optimizer": "adamW2"}, "optimizer=adamw2: expected one of adam, adamw, "),
    "a precision": ({"precision": "bfloat16"}, "precision=bfloat16: expected one of auto, fp32, tf32, fp16, bf16"),
    "no precision": ({"precision": []}, "precision=[]: expected one of auto, fp32, tf32, fp16, bf16, torch.bfloat16"),
    "steps twice": (
        {"steps": 5, "train": {"steps": 3}}, "steps=5: is set among the values of train, too: expected it once",
    ),
    "a rate twice": (
        {"lr": 0.1, "task": {"optimizer": {"lr": 0.3}}}, "lr=0.1: is set among the values of task, too: expected it",
    ),
    "steps": ({"steps": 0}, "steps=0: expected a whole number of at least 1"),
    "lr": ({"lr": -1.0}, "lr=-1.0: expected a finite number above 0"),
    "a backend": ({"backends": ["ampp"]}, "backends=ampp: expected one of accelerate, amp, "),
    "no backend": ({"backends": []}, "backends=[]: expected at least one name, class, or function step(model, "),
    "a class": ({"backends": [Net]}, "backends=Net: is no backend: expected a class with PRECISIONS"),
    "a step named like a backend of ours": (
        {"backends": ["amp", fused]}, "backends=fused: is the name of a backend of mpcompare: give yours another",
    ),
    "a class named like a backend of ours": (
        {"backends": type("jax", (Amp,), {})}, "backends=jax: is the name of a backend of mpcompare: give yours",
    ),
    "a step": ({"backends": [lambda model: 0]}, "backends=<lambda>: takes (model): write def step(model, optimizer,"),
    "a scaler": ({"backends": [step_with_a_scaler_of_its_own]}, "backends=step_with_a_scaler_of_its_own: uses SCALER"),
    "data": ({"data": 3}, "data=int: expected a DataLoader, a Dataset, tensors or arrays (x, y), the name of a data"),
    "a name of data": ({"data": "mnits"}, "data=mnits: expected one of auto, cifar10, digits,"),
    "a class of data": ({"data": Samples}, "data=Samples: is a class"),
    "a batch too large": (
        {"model": Net, "data": (X, Y), "batch_size": 600},
        "batch_size=600: the data has only 569 training samples (71 are held out)",
    ),
    "a batch as of the command line": (
        {"model": Net, "data": (X, Y), "task": {"batch_size": 600}}, "task.batch_size=600: the data has only 569",
    ),
    "a batch larger than a function's data": (
        {"model": Net, "data": lambda seed: (X, Y, X, Y), "batch_size": 5000},
        "batch_size=5000: data=<lambda> has only 640 training samples (640 are held out)",
    ),
    "another width of a function": (
        {"model": Net, "data": lambda seed: (X[:, :5], Y, X[:, :5], Y), "batch_size": 8},
        "model=Net: cannot be called with data=<lambda>, inputs [4, 5] float32: RuntimeError: ",
    ),
    "a function that fails": (
        {"model": Net, "data": lambda seed: 1 / 0}, "data=<lambda>: raises ZeroDivisionError: division by zero (",
    ),
    "a network that fails": (
        {"model": lambda: nn.Linear(1 // 0, 3), "data": (X, Y), "batch_size": 8},
        "model=<lambda>: raises ZeroDivisionError: integer division or modulo by zero (",
    ),
    "a function of three": (
        {"model": Net, "data": lambda seed: (X, Y, X)}, "data=<lambda>: expected a Dataset, or the tensors x_train",
    ),
    "a number that is not finite": (
        {"model": Net, "data": (torch.where(X[5, 2] == X, math.nan, X), Y), "batch_size": 8},
        "the data: x_train, sample 5, feature 2 is nan: expected finite numbers",
    ),
    "a number that is not finite of a function": (
        {"task": "recipe_mlp", "data": lambda seed: (X / 0, Y, X, Y)},
        "data=<lambda>: x_train, sample 0, feature 0 is -inf, and 7679 more: expected finite numbers",
    ),
    "no divisor": (
        {"model": Net, "data": (X, Y), "batch_size": 32, "task": {"accumulate": 3}},
        "task.accumulate=3: expected a divisor of batch_size=32",
    ),
    "a device": ({"device": "gpu"}, "device=gpu: expected one of auto, cpu, cuda"),
    "a precision of another": (
        {"backends": ["amp"], "precision": "fp32"}, "precision=fp32: backend=amp accepts one of auto, fp16, bf16",
    ),
    "another width": (
        {"model": Net, "data": (X[:, :5], Y), "batch_size": 8},
        "model=Net: cannot be called with the data, inputs [4, 5] float32: RuntimeError: ",
    ),
    "real targets": ({"model": Net, "data": (X, X), "batch_size": 8}, "loss=cross_entropy: cannot be taken of the"),
    "a schedule of torch": (
        {"schedule": torch.optim.lr_scheduler.CosineAnnealingLR},
        "schedule=CosineAnnealingLR: expected one of constant, cosine, task, warmup",
    ),
    "a schedule that is a function": ({"schedule": lambda step: 0.5}, "schedule=<lambda>: expected one of constant, "),
    "no name": ({"stepz": 3}, "stepz=3: is no argument (did you mean steps?)"),
    "no value of a section": ({"train": {"stepz": 3}}, "train.stepz=3: expected one of steps, warmup_steps,"),
    "no value of the task": (
        {"model": Net, "task": {"batchsize": 3}}, "task.batchsize=3: expected one of model, loss, optimizer, batch",
    ),
    "an array of objects": (
        {"model": Net, "data": (X.numpy(), np.array([None] * 640))}, "data=ndarray object: expected a tensor or a",
    ),
    "samples without numbers": (
        {"model": Net, "data": (X.to("meta"), Y)}, "data=Tensor torch.float32: expected a tensor or a numpy array of",
    ),
    "no data": ({"model": Net, "data": ()}, "data=tuple: is empty: expected inputs and targets"),
    "no data by name": ({"model": Net, "data": ({}, {})}, "data=tuple: is empty: expected inputs and targets"),
    "empty batches": ({"model": Net, "data": iter([()] * 3)}, "data=tuple: is empty: expected inputs and targets"),
    "one target": (
        {"model": Net, "data": (X, torch.tensor(2))}, "data=2: is a single number: expected a tensor with a row for",
    ),
    "a number in a batch": (
        {"model": Net, "data": iter([{"epoch": torch.tensor(1), "x": X}])}, "data=1: is a single number: expected",
    ),
    "three tensors": ({"model": Net, "data": (X, Y, X[:9])}, "data=3 tensors: expected 2 or 4, or several inputs and"),
    "several lengths": (
        {"model": Net, "data": iter([(X[:4, :7], Y[:4]), (X[4:], Y[4:])])}, "data=loader: gives batches that do not",
    ),
    "bf16 weights": ({"model": Net().bfloat16(), "data": (X, Y)}, "model=Net: parameter hidden.weight is torch.bf"),
}  # fmt: skip


def test_numbers_that_are_not_finite_may_be_asked_for(tmp_path):
    data = (torch.where(X[5, 2] == X, math.nan, X), Y)
    overrides, _ = composed(tmp_path, model=Net, data=data, batch_size=8, train={"not_finite": True})
    assert overrides


@pytest.mark.parametrize(
    ("arguments", "backends"),
    [({}, "amp,fp32"), ({"precision": "bf16"}, "amp"), ({"backends": "fp32"}, "fp32")],
)
def test_a_network_of_ones_own_is_trained_by_amp_and_fp32_unless_others_are_named(arguments, backends, tmp_path):
    overrides, _ = composed(tmp_path, model=Net, data=(X, Y), **arguments)
    assert [each for each in overrides if each.startswith("backend=")] == [f"backend={backends}"]


def test_a_task_of_ours_has_the_backend_of_the_settings(tmp_path):
    assert not [each for each in composed(tmp_path, task="mnist_mlp")[0] if each.startswith("backend=")]


def test_the_generators_of_gpus_draw_on_from_the_callers_seed(monkeypatch, tmp_path):
    seeds = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.default_generator.manual_seed(12)
    composed(tmp_path, model=Net, data=(X, Y), batch_size=8)
    assert len(seeds) > 1
    assert seeds[-1] == 12


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_one_line_within_a_second(name, tmp_path):
    arguments, message = REFUSED[name]
    start = time.thread_time()  # other programs may keep this thread from a core
    with pytest.raises(InputError) as refused:
        mpcompare.compare(folder=tmp_path / "runs", **arguments)
    assert time.thread_time() - start < 1
    assert str(refused.value).startswith(message)
    assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_holds_a_run_is_refused_by_the_name_of_the_argument(tmp_path):
    (tmp_path / "0-amp-auto").mkdir()
    (tmp_path / "0-amp-auto" / "result.json").write_text("{}")
    with pytest.raises(InputError, match=re.escape(f"folder={tmp_path}: already holds a run")):
        mpcompare.compare(model=Net, data=(X, Y), folder=tmp_path)


def test_a_function_of_the_seed_is_called_once_before_the_race(tmp_path):
    seeds = []
    composed(tmp_path, model=Net, data=lambda seed: seeds.append(seed) or (X, Y, X, Y), seed=7)
    assert seeds == [7]


@pytest.mark.slow
def test_the_loop_as_people_write_it_is_compared(tmp_path, monkeypatch):
    result = mpcompare.compare(
        model=Net(), data=LOADER, loss=nn.CrossEntropyLoss, optimizer=torch.optim.AdamW, steps=4, lr=3e-4,
        precision=torch.bfloat16, backends=["amp", "fp32", my_step, my_halving_step], folder=tmp_path / "runs", **SMALL,
    )  # fmt: skip
    assert {label: str(verdict) for label, verdict in result.verdicts.items()} == {
        "amp bf16": "reference",
        "fp32": "reference",
        "my_step bf16": "same",
        "my_halving_step bf16": "differs: gradient scaled",
    }
    assert result.errors == {}
    assert "my_step" in result._repr_html_()
    shown = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    result.open()
    assert shown == [(tmp_path / "runs" / "report" / "index.html").as_uri()]


@pytest.mark.slow
def test_the_loop_of_the_page_is_compared(tmp_path, monkeypatch):
    page = (CONF.parent / "docs" / "from_python.md").read_text()
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def my_step" in code)
    monkeypatch.chdir(tmp_path)
    subprocess.run(
        [sys.executable, "-"], input=block, text=True, check=True, env={**os.environ, "PYTHONPATH": str(CONF.parent)},
    )  # fmt: skip


@pytest.mark.slow
def test_a_step_with_a_scaler_is_compared_in_fp16(tmp_path):
    def scaled(model, optimizer, batch, scaler):
        x, y = batch
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    result = mpcompare.compare(
        model=Net, data=(X.numpy(), Y.numpy()), batch_size=32, steps=4, precision="fp16", backends=["amp", scaled],
        folder=tmp_path / "runs", **SMALL,
    )  # fmt: skip
    assert str(result.verdicts["scaled fp16"]) == "same", result.verdicts["scaled fp16"].because


@pytest.mark.slow
def test_a_data_set_of_dicts_and_a_network_with_its_loss_are_compared(tmp_path):
    result = mpcompare.compare(model=Labelled(), data=Words(), batch_size=8, steps=4, lr=0.1, folder=tmp_path / "runs",
                               backends=["amp", "master_weights", "fp32"], **SMALL)  # fmt: skip
    assert [str(verdict) for verdict in result.verdicts.values()] == ["reference", "same", "reference"]
