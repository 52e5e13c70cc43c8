"""The caller's network, loss, data and optimizer as overrides. They are tried out here, on a few samples."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mpcompare.api import checks, optimizers, samples
from mpcompare.api.objects import Objects, written
from mpcompare.errors import InputError
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.data.given import dataset_of
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.trial import try_out

BATCH_SIZE, STEPS = 256, 20  # conf/task/module.yaml and conf/config.yaml
WARMUP = 3


def overrides_of(call: Any, objects: Objects) -> list[str]:
    """Returns the overrides of a call's network, loss, optimizer and data. Raises InputError where one is not accepted,
    or they do not fit each other."""
    if call.model is not None:
        if isinstance(call.knobs.get("task"), str):
            raise InputError("task", call.knobs["task"], "expected either a task, or a model, whose task is module")
        checks.check_model(call.model)
    loss = None if call.loss is None else checks.read_loss(call.loss)
    overrides = [] if call.optimizer is None else list(_optimizer(call.optimizer, call.model, objects))
    asked = call.batch_size or _knob(call, "task", "batch_size")
    size, in_memory = asked or samples.batch_size_of(call.data), None
    if isinstance(call.data, str):
        checks.check_data(call.data)
        overrides.append(f"data={call.data}")
    elif samples.is_function(call.data):
        overrides += ["data=function", f"++data={written('data', objects.function(call.data, 'data'))}"]
    elif call.data is not None:
        loss = loss or ("model" if samples.has_labels(call.data) else None)
        in_memory = _in_memory(call, loss, size or BATCH_SIZE)
        if size and asked is None:
            overrides.append(f"++task.batch_size={size}")
        overrides += ["data=function", f"++data={written('data', objects.function(_loader(in_memory), 'data'))}"]
    if loss is not None:
        node = loss if isinstance(loss, str) else objects.function(loss, "loss")
        overrides.append(f"++task.loss={written('loss', node)}")
    if call.model is None:
        return overrides
    make = _copies_of(call.model) if isinstance(call.model, nn.Module) else call.model
    if in_memory is not None:
        _try(make, loss or "cross_entropy", in_memory, size)
    return ["task=module", f"++task.model={written('model', objects.call(make, 'model'))}", *overrides]


def _optimizer(optimizer: Any, model: Any, objects: Objects) -> Iterator[str]:
    if optimizer == "task":  # the task's own
        return
    word, values = optimizers.read(optimizer, model, objects)
    yield f"optimizer={word}"
    for name, value in values.items():
        yield f"++task.optimizer.{name}={written(name, value)}"


def _knob(call: Any, section: str, name: str) -> Any:
    """Returns a value of a section that the call sets, by whatever name; None where it sets none."""
    of_section = call.knobs.get(section)
    return call.knobs.get(f"{section}.{name}", of_section.get(name) if isinstance(of_section, Mapping) else None)


def _in_memory(call: Any, loss: Any, batch_size: int) -> samples.Parts:
    """Returns the samples of the caller's data, as many as the training and a few batches of held-out ones need."""
    steps = call.steps or _knob(call, "train", "steps") or STEPS
    wanted = (steps + WARMUP) * batch_size * (samples.HELD_OUT + 1) // samples.HELD_OUT
    return samples.parts_of(call.data, wanted, call.model, loss or "cross_entropy")


def _loader(parts: samples.Parts) -> Callable[[int], Any]:
    def in_memory(seed: int) -> Any:
        return parts

    return in_memory


def _copies_of(module: nn.Module) -> Callable[[], nn.Module]:
    """Returns a function that returns a copy of a module: the weights that it has now are the initial ones."""
    kept = copy_of(module).cpu().train()

    def network() -> nn.Module:
        return copy_of(kept)

    network.__name__ = type(module).__name__
    return network


def _try(make: Callable[[], Any], loss: Any, parts: samples.Parts, batch_size: int | None) -> None:
    """Calls network and loss as an entrant does before it trains, so that what does not fit is said at once. Raises
    InputError in the words of the call."""
    try:
        data = dataset_of(parts, "data")
        rows = len(data.x_train)
        if batch_size and rows < batch_size:
            said = f"data has only {rows} training samples"
            raise InputError("batch_size", batch_size, f"{said} ({len(data.x_test)} are held out)")
        task = Task(make, loss, Sgd(0.1), 1)
        model = task.new_model(0, torch.device("cpu"))
        try_out(model, task, data.x_train, data.y_train, "data", data.y_test)
    except InputError as error:
        words = {"task.model": "model", "task.loss": "loss", "data._target_=data": "data", "data=data": "the data"}
        line = str(error)
        for own, callers in words.items():
            line = line.replace(own, callers)
        raise InputError.of(line) from error
