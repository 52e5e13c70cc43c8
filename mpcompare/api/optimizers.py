"""An optimizer as people write it, as the word and the values of the configuration."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from glob import escape
from typing import Any

import torch
from torch import nn

from mpcompare.errors import InputError, check_choice, did_you_mean

WORDS = ("sgd", "momentum", "nesterov", "adam", "adamw")
KNOWN = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
VALUES = ("lr", "betas", "eps", "momentum", "nesterov", "weight_decay")
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")  # change no number
EXPECTED = f"expected one of {', '.join(WORDS)}, torch.optim.SGD, Adam or AdamW, or a function of the parameters"


def read(optimizer: Any, model: Any) -> tuple[str, Mapping[str, Any]]:
    """Returns the word of an optimizer, and its values.

    Args:
        optimizer: a word, a class of ``torch.optim``, an optimizer, or a function of the parameters that makes one.
        model: the network, whose parameters have names.

    Raises:
        InputError: it is none of them, or one whose updates are not known here.
    """
    if isinstance(optimizer, str):
        check_choice("optimizer", optimizer.lower(), WORDS)
        return optimizer.lower(), {}
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _made(optimizer, model)
    if type(made) not in KNOWN:
        name = type(made).__name__
        near = did_you_mean(name, [cls.__name__ for cls in KNOWN])
        raise InputError("optimizer", name, f"its updates are not known here{near}: {EXPECTED}")
    if len(made.param_groups) > 1 and not isinstance(model, nn.Module):
        expected = "has groups of parameters without names: give the module itself as model, or task.optimizer.groups"
        raise InputError("optimizer", type(made).__name__, expected)
    first = made.param_groups[0]
    for name, value in first.items():
        if value and name not in (*VALUES, *IMPLEMENTATION, "params", "decoupled_weight_decay", "initial_lr"):
            raise InputError(f"optimizer: {name}", value, "is not known here: leave it out")
    values = {name: first[name] for name in VALUES if name in first}
    if len(made.param_groups) > 1:
        values["groups"] = _groups(made, model)
    word = "adamw" if first.get("decoupled_weight_decay") else KNOWN[type(made)]
    return word, {name: float(v) if isinstance(v, torch.Tensor) else v for name, v in values.items()}


def _made(maker: Any, model: Any) -> Any:
    """Returns what a class, or a function, makes of parameters."""
    if not callable(maker):
        raise InputError("optimizer", maker, EXPECTED)
    params = list(model.parameters()) if isinstance(model, nn.Module) else [nn.Parameter(torch.zeros(1))]
    try:
        made = maker(params)
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError("optimizer", _name(maker), f"cannot be called with parameters ({line}): {EXPECTED}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError("optimizer", _name(maker), f"makes a {type(made).__name__}: {EXPECTED}")
    return made


def _groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[dict[str, Any]]:
    """Returns the groups by the names of their parameters; the first gives the optimizer's own values."""
    names = {id(p): name for name, p in model.named_parameters()}
    first, *others = optimizer.param_groups
    groups = []
    for group in others:
        if unknown := [p for p in group["params"] if id(p) not in names]:
            raise InputError("optimizer", type(optimizer).__name__, f"has {len(unknown)} parameters that model has not")
        factor = float(group["lr"]) / float(first["lr"])
        match = [escape(names[id(p)]) for p in group["params"]]
        groups.append({"match": match, "lr_factor": factor, "weight_decay": group.get("weight_decay", 0.0)})
        for name in VALUES:
            if name not in ("lr", "weight_decay") and group.get(name) != first.get(name):
                raise InputError(f"optimizer: {name}", group[name], f"expected {first[name]} in all groups")
    return groups


def _name(maker: Callable[..., Any]) -> str:
    own = maker.func if isinstance(maker, partial) else maker
    return own.__name__ if inspect.isroutine(own) or inspect.isclass(own) else type(own).__name__
