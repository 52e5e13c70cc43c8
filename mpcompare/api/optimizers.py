"""An optimizer as people write it, as the word and the values of the configuration."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.api.objects import Objects
from mpcompare.errors import InputError, check_choice, in_full
from mpcompare.paths import CONF
from mpcompare.tasks.any_optimizer import fault_of
from mpcompare.tasks.groups import params_in
from mpcompare.tasks.optimizers import OF_TORCH

WORDS = sorted({path.stem for path in (CONF / "optimizer").glob("*.yaml")} - {"task", "torch"})
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")  # change no number
UNASKED = (*IMPLEMENTATION, "params", "decoupled_weight_decay", "initial_lr")
EXPECTED = f"expected one of {', '.join(WORDS)}, a class of torch.optim, or a function of the parameters"


def read(optimizer: Any, model: Any, objects: Objects) -> tuple[str, Mapping[str, Any]]:
    """Returns the word of an optimizer, and its values. Raises InputError where it is no optimizer, its updates cannot
    be replayed, or it leaves parameters of the network out.

    Args:
        optimizer: a word, a class like the classes of ``torch.optim``, an optimizer, or a function of the parameters
            that makes one.
        model: the network, whose parameters have names.
        objects: gets the class where a new process cannot import it.
    """
    if isinstance(optimizer, str):
        check_choice("optimizer", optimizer.lower(), WORDS)
        return optimizer.lower(), {}
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _made(optimizer, model)
    if len(made.param_groups) > 1 and not isinstance(model, nn.Module):
        expected = "has groups of parameters without names: give the module itself as model, or task.optimizer.groups"
        raise InputError("optimizer", type(made).__name__, expected)
    if isinstance(model, nn.Module):
        _check_all_taken(made, model)
    first = _values(made.param_groups[0])
    groups = {"groups": _groups(made, model)} if len(made.param_groups) > 1 else {}
    if known := OF_TORCH.get(type(made)):
        own = {field.name: first[field.name] for field in fields(known) if field.name in first}
        if not any(value for name, value in first.items() if name not in (*own, *UNASKED)):
            word = "adamw" if first.get("decoupled_weight_decay") else known.__name__.lower()
            return word, {**own, **groups}
    given = optimizer.keywords if isinstance(optimizer, partial) and optimizer.func is type(made) else {}
    told = given if given or optimizer is type(made) else None
    return "torch", {**_by_its_class(type(made), first, told, objects), **groups}


def _by_its_class(
    cls: type, first: Mapping[str, Any], given: Mapping[str, Any] | None, objects: Objects
) -> dict[str, Any]:
    """Returns the node of an optimizer: its class, its rate, and what is not the default of the class. ``first`` is its
    first group, ``given`` all arguments except the parameters, or None where only the group tells them."""
    takes = {name: each for name, each in inspect.signature(cls).parameters.items() if name != "params"}
    hidden = [name for name in takes if name not in first and name not in IMPLEMENTATION]
    if given is None and hidden:
        expected = f"cannot be read from it: expected functools.partial({cls.__name__}, ...), or the class itself"
        raise InputError(f"optimizer: {hidden[0]}", cls.__name__, expected)
    values = {**{name: first[name] for name in takes if name in first}, **(given or {})}
    own = {
        name: value
        for name, value in values.items()
        if name == "lr" or (name not in IMPLEMENTATION and (name not in takes or value != takes[name].default))
    }
    if "lr" not in own:
        raise InputError("optimizer", cls.__name__, "has no argument lr, the rate that a schedule sets")
    if fault := fault_of(lambda p: cls([p], **own), own["lr"]):
        raise InputError("optimizer", cls.__name__, fault)
    return {"_target_": objects.name(cls, "optimizer"), **own}


def _made(maker: Any, model: Any) -> Any:
    if isinstance(maker, (list, tuple, dict)):
        expected = "expected one: networks with optimizers of their own, as of a GAN, are compared one after the other"
        raise InputError("optimizer", f"{len(maker)} optimizers", expected)
    if not callable(maker):
        raise InputError("optimizer", maker, EXPECTED)
    params = list(model.parameters()) if isinstance(model, nn.Module) else [nn.Parameter(torch.zeros(1))]
    try:
        made = maker(params)
    except Exception as error:
        expected = f"cannot be called with parameters ({in_full(error)}): {EXPECTED}"
        raise InputError("optimizer", _name(maker), expected) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError("optimizer", _name(maker), f"makes a {type(made).__name__}: {EXPECTED}")
    return made


def _check_all_taken(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises InputError where an optimizer leaves a parameter out that is not frozen: a run would train it."""
    taken = set(map(id, params_in(optimizer)))
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in taken]
    if left:
        expected = f"leaves {left[0]} of the model out: expected all parameters, or requires_grad_(False) of the others"
        raise InputError("optimizer", type(optimizer).__name__, expected)


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a group as they were before a scheduler of torch changed the rate."""
    values = {name: float(v) if isinstance(v, Tensor) else v for name, v in group.items()}
    return {**values, "lr": values["initial_lr"]} if "initial_lr" in values else values


def _groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[dict[str, Any]]:
    """Returns the groups by the names of their parameters; the first gives the optimizer's own values."""
    names = {id(p): name for name, p in model.named_parameters()}
    first, *others = map(_values, optimizer.param_groups)
    if not first.get("lr"):
        raise InputError("optimizer: lr", first.get("lr"), "expected a rate above 0 in the first group")
    groups = []
    for group in others:
        if unknown := [p for p in group["params"] if id(p) not in names]:
            raise InputError("optimizer", type(optimizer).__name__, f"has {len(unknown)} parameters that model has not")
        match = [escape(names[id(p)]) for p in group["params"]]
        decay = {"weight_decay": group["weight_decay"]} if "weight_decay" in group else {}
        groups.append({"match": match, "lr_factor": group["lr"] / first["lr"], **decay})
        for name in group:
            if name not in ("lr", "weight_decay", *UNASKED) and group[name] != first.get(name):
                raise InputError(f"optimizer: {name}", group[name], f"expected {first.get(name)} in all groups")
    return groups


def _name(maker: Callable[..., Any]) -> str:
    own = maker.func if isinstance(maker, partial) else maker
    return own.__name__ if inspect.isroutine(own) or inspect.isclass(own) else type(own).__name__
