"""Copies of networks. ``copy.deepcopy`` leaves functions as they are: a forward that somebody put on a module still
calls the modules of the first network, and a hook still writes into them. Here the functions of a copy know the
modules of the copy.
"""

import copy
import threading
from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
Module = TypeVar("Module", bound=nn.Module)


def copy_of(network: Module, kept: Mapping[int, Any] | None = None) -> Module:
    """Returns a copy of a network. ``kept`` maps the ``id`` of an object within the network to the object that the copy
    has in its place."""
    known = dict(kept or {})
    with _ONE_AT_A_TIME, mock.patch.object(Tensor, "__deepcopy__", _detached):
        made = copy.deepcopy(network, known)
    for module in made.modules():
        for owner in (vars(module), *(vars(module).get(hooks, {}) for hooks in HOOKS)):
            for name, value in owner.items():
                if isinstance(value, FunctionType):
                    owner[name] = _of_copy(value, known)
    return made


_ONE_AT_A_TIME = threading.RLock()  # two threads would put back each other's method
_COPY_OF_TENSOR = Tensor.__deepcopy__


def _detached(value: Tensor, known: dict[int, Any]) -> Tensor:
    """Returns a copy of a tensor. Torch copies no results, such as the state that a layer left or the numbers of a
    distribution: a copy has their numbers, and not their graph. It copies no matrix of compressed rows, either."""
    if value.is_leaf and (value.layout is torch.strided or value.is_sparse):
        return _COPY_OF_TENSOR(value, known)
    return value.detach().clone()


def _of_copy(value: Any, known: dict[int, Any]) -> Any:
    """Returns the copy of a value within a function: ``known`` has the copies by ``id``."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _of_copy(value.__self__, known))
    if not isinstance(value, FunctionType) or not (value.__closure__ or value.__defaults__):
        return value
    cells = tuple(CellType() for _ in value.__closure__ or ())
    known[id(value)] = made = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
    vars(made).update(vars(value))
    made.__kwdefaults__ = value.__kwdefaults__
    made.__defaults__ = value.__defaults__ and tuple(_of_copy(each, known) for each in value.__defaults__)
    for cell, first in zip(cells, value.__closure__ or (), strict=True):
        if first != CellType():  # an empty cell stays empty
            cell.cell_contents = _of_copy(first.cell_contents, known)
    return made
