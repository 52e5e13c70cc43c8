"""Arguments of a call, checked before anything starts: their words are the caller's, not the configuration's."""

import inspect
import pydoc
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib import metadata
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from mpcompare.command.entry_points import GROUP
from mpcompare.errors import InputError, check_choice, did_you_mean, fault_of_call
from mpcompare.paths import CONF
from mpcompare.precision import PRECISIONS, meant_precision, resolve_precision
from mpcompare.tasks.losses import LOSSES
from mpcompare.tasks.task import Task

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
GROUPS = ("task", "optimizer", "schedule", "loss_scale", "data", "experiment", "ablation", "backend", "hydra")
OF_TASK = tuple(field.name for field in fields(Task))


def check_model(model: Any) -> None:
    """Raises InputError unless ``model`` is a module, or makes one when it is called."""
    if isinstance(model, nn.Module):
        if hasattr(model, "_orig_mod"):
            raise InputError("model", "OptimizedModule", "is compiled: give the module itself")
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise InputError("model", type(model).__name__, "is a wrapper: write model=model.module")
        if meta := [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]:
            expected = f"{meta[0]} is on the device meta, without numbers: expected them on cpu or cuda"
            raise InputError("model", type(model).__name__, expected)
        return
    expected = "expected a module, its class, or a function that makes it, as in model=lambda: Net(64)"
    if not callable(model):
        raise InputError("model", model if isinstance(model, str) else type(model).__name__, expected)
    if fault := fault_of_call(model):
        name = getattr(model, "__name__", type(model).__name__)
        raise InputError("model", name, f"{fault}: write model=lambda: {name}(...)")


def read_loss(loss: Any) -> Any:
    """Returns the name of a loss, or a function; of a class, such as ``nn.CrossEntropyLoss``, what it makes."""
    if isinstance(loss, str):
        check_choice("loss", loss, LOSSES)
        return loss
    if inspect.isclass(loss):
        try:
            loss = loss()
        except TypeError as error:
            raise InputError("loss", loss.__name__, f"{error}: write loss={loss.__name__}(...)") from None
    if not callable(loss):
        expected = f"expected one of {', '.join(LOSSES)}, or a function of output and targets"
        raise InputError("loss", loss, expected)
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise InputError("loss", type(loss).__name__, "has parameters of its own: put them into the model")
    return loss


def read_precisions(precision: Any, backends: Iterable[Any], device: str) -> list[str]:
    """Returns the names of precisions. ``auto`` stands for a 16-bit one where a backend in fp32 takes part, too."""
    names, accepted = [], ["auto", *PRECISIONS]
    expected = f"expected one of {', '.join(accepted)}, torch.bfloat16, torch.float16, torch.float32"
    for each in precision if isinstance(precision, (list, tuple)) else [precision]:
        name = DTYPES.get(each, str(each)) if isinstance(each, torch.dtype) else each
        if name not in accepted:
            raise InputError("precision", name, expected + meant_precision(name, accepted))
        names.append(str(name))
    if not names:
        raise InputError("precision", precision, expected)
    on_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    plain = [each for each in backends if each in ("fp32", "tf32")]
    if plain and len(names) == 1 and names[0] in ("fp16", "bf16"):
        if names[0] != ("fp16" if on_cuda else "bf16"):
            raise InputError("precision", names[0], f"backend {plain[0]} has none of 16 bits: leave one of them out")
        return ["auto"]
    for backend in backends:
        _check_precisions(backend, names, "cuda" if on_cuda else "cpu")
    return names


def _check_precisions(backend: Any, names: Iterable[str], device_type: str) -> None:
    """Raises InputError where a backend accepts none of the precisions."""
    name = backend if isinstance(backend, str) else backend.__name__
    path = CONF / "backend" / f"{name}.yaml"
    if isinstance(backend, str):
        node: Any = OmegaConf.load(path) if path.is_file() else {}  # none of an installed package's
        backend = pydoc.locate(node.get("_target_", ""))
    refused = []
    for each in names if hasattr(backend, "PRECISIONS") else ():
        try:
            resolve_precision(each, backend.PRECISIONS, device_type, name)
            return
        except InputError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def check_backend(name: str) -> None:
    """Raises InputError unless a backend of this project, or of an installed package, has the name."""
    folder = CONF / "backend"
    known = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    known += [entry.name for entry in metadata.entry_points(group=GROUP)]
    if name not in known:
        accepted = ", ".join(sorted(each for each in known if "/" not in each))
        expected = f"expected one of {accepted}, a class, or a function step(model, optimizer, batch)"
        raise InputError("backends", name, expected + did_you_mean(name, known))


def check_data(name: str) -> None:
    """Raises InputError unless a data set has the name."""
    check_choice("data", name, sorted(path.stem for path in (CONF / "data").glob("*.yaml") if path.stem != "function"))


def check_knobs(knobs: Mapping[str, Any], of_caller: Iterable[str], own_task: bool) -> None:
    """Raises InputError where a key is none of the configuration's, and where a section lacks values.

    Args:
        of_caller: the names of the other arguments, one of which may have been meant.
        own_task: whether the task is the caller's own network.
    """
    settings: Any = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))
    sections: dict[str, Any] = {key: value for key, value in settings.items() if isinstance(value, dict)}
    known = [*(key for key in settings if key != "defaults"), *GROUPS]
    for given_key, value in knobs.items():
        key = given_key.removeprefix("+")
        section, _, rest = key.partition(".")
        if section not in known:
            accepted = [*of_caller, *known]
            near = did_you_mean(key, accepted)
            raise InputError(given_key, value, f"is no argument{near}; docs/from_python.md has them all")
        if key in GROUPS and not isinstance(value, (str, Mapping)):
            accepted = sorted(path.stem for path in (CONF / key).glob("*.yaml"))
            name = getattr(value, "__name__", type(value).__name__)
            raise InputError(key, name, f"expected one of {', '.join(accepted)}{did_you_mean(name, accepted)}")
        names = list(value) if isinstance(value, Mapping) else [rest.partition(".")[0]] if rest else []
        accepted = list(sections.get(section, {})) if section != "hydra" else []
        if section == "task" and own_task:
            accepted = list(OF_TASK)
        for name in names:
            if accepted and name not in accepted:
                given = value[name] if isinstance(value, Mapping) else value
                expected = f"expected one of {', '.join(accepted)}{did_you_mean(name, accepted)}"
                raise InputError(f"{section}.{name}", given, expected)
