"""The caller's network, loss, data and optimizer as overrides. They are tried out here, on a few samples."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from mpcompare import generators
from mpcompare.api import checks, optimizers, samples
from mpcompare.api.arguments import Arguments
from mpcompare.api.objects import Objects, written
from mpcompare.errors import InputError, result_of
from mpcompare.paths import CONF
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.data import Dataset, given
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.trial import try_out

IN_MEMORY = "the data"  # the name of data that have none
TASK = "mnist_mlp"  # conf/config.yaml


def overrides_of(call: Arguments, objects: Objects) -> list[str]:
    """Returns the overrides of a call's network, loss, optimizer and data. Raises InputError where one is not accepted,
    or they do not fit each other."""
    if call.model is not None:
        if isinstance(call.knobs.get("task"), str):
            raise InputError("task", call.knobs["task"], "expected either a task, or a model, whose task is module")
        checks.check_model(call.model)
    loss = None if call.loss is None else checks.read_loss(call.loss)
    set_loss = call.setting("task", "loss")  # a name, or a node
    overrides: list[str] = []
    if call.optimizer not in (None, "task"):  # the task's own
        word, values = optimizers.read(call.optimizer, call.model, objects)
        settings = [f"++task.optimizer.{name}={written(name, value)}" for name, value in values.items()]
        overrides += [f"optimizer={word}", *settings]
    load: Callable[[], Dataset] | None = None
    if isinstance(call.data, str):
        checks.check_data(call.data)
        overrides.append(f"data={call.data}")
    elif samples.is_function(call.data):
        seed = call.setting("seed")
        load = partial(given.load, call.data, seed if isinstance(seed, int) else 0)
        overrides += ["data=function", f"++data={written('data', objects.function(call.data, 'data'))}"]
    elif call.data is not None:
        if loss is None and set_loss is None and samples.has_labels(call.data):
            loss = "model"
        parts = _in_memory(call, loss or set_loss)
        load = partial(given.dataset_of, parts, IN_MEMORY)

        def in_memory(seed: int) -> samples.Parts:
            return parts

        size = samples.batch_size_of(call.data)
        if size and _asked_size(call) is None:
            overrides.append(f"++task.batch_size={size}")
        overrides += ["data=function", f"++data={written('data', objects.function(in_memory, 'data'))}"]
    if loss is not None:
        node = loss if isinstance(loss, str) else objects.function(loss, "loss")
        overrides.append(f"++task.loss={written('loss', node)}")
    data = load() if load is not None else None
    if data is not None and not call.setting("train", "not_finite") and (infinite := given.not_finite(data)):
        raise given.refused(data.name, infinite)
    if call.model is None:
        return overrides
    make = _copies_of(call.model) if isinstance(call.model, nn.Module) else call.model
    if data is not None and not isinstance(set_loss, Mapping):  # nothing is made of a node here
        _try(call, make, loss or set_loss or "cross_entropy", data)
    return ["task=module", f"++task.model={written('model', objects.call(make, 'model'))}", *overrides]


def _asked_size(call: Arguments) -> int | None:
    return call.batch_size or _whole(call.setting("task", "batch_size"))


def _whole(value: Any) -> int | None:
    """Returns a positive whole number, or its digits, as Hydra reads it; None of all else, which the runs refuse."""
    return int(value) or None if str(value).isdecimal() else None


def _batch_size(call: Arguments) -> int:
    """Returns the batch size of a call: the size it asks for, its loader's, or the default of its task."""
    if size := _asked_size(call) or samples.batch_size_of(call.data):
        return size
    chosen = call.setting("task") if isinstance(call.setting("task"), str) else TASK
    path = CONF / "task" / f"{'module' if call.model is not None else chosen}.yaml"
    if not path.is_file():  # Hydra knows it, or says what is wrong
        path = CONF / "task" / f"{TASK}.yaml"
    return int(OmegaConf.load(path)["batch_size"])  # type: ignore[index]


def _in_memory(call: Arguments, loss: Any) -> samples.Parts:
    """Returns the samples of the caller's data, as many as the training and a few batches of held-out ones need."""
    train: Any = OmegaConf.load(CONF / "config.yaml")["train"]  # type: ignore[index]
    steps, warmup = (_whole(call.setting("train", name)) or train[name] for name in ("steps", "warmup_steps"))
    needed = ((call.steps or steps) + warmup) * _batch_size(call)
    wanted = needed * samples.HELD_OUT // (samples.HELD_OUT - 1)
    return samples.parts_of(call.data, wanted, call.model, loss or "cross_entropy")


def _copies_of(module: nn.Module) -> Callable[[], nn.Module]:
    """Returns a function that returns a copy of a module: the weights that it has now are the initial ones."""
    kept = copy_of(module).cpu().train()

    def network() -> nn.Module:
        return copy_of(kept)

    network.__name__ = type(module).__name__
    return network


def _try(call: Arguments, make: Callable[[], Any], loss: Any, data: Dataset) -> None:
    """Calls network and loss as an entrant does before it trains, so that what does not fit is said at once."""
    size, rows = _batch_size(call), len(data.x_train)
    if rows < size:
        said = f"data={data.name} has only {rows} training samples ({len(data.x_test)} are held out)"
        raise InputError("task.batch_size", size, said)
    asked = {name: call.setting("task", name) for name in ("accumulate", "clip_norm")}
    plain = {name: value for name, value in asked.items() if value is not None and not isinstance(value, str)}
    name = getattr(make, "__name__", type(make).__name__)
    task = Task(partial(result_of, "task.model", name, make), loss, Sgd(0.1), size, **plain)
    with generators.torchs_kept():
        model = task.new_model(0, torch.device("cpu"))
        try_out(model, task, data.x_train, data.y_train, data.name, data.y_test)
