"""The plain attributes of modules and their hooks, which a loop may change between two calls of its network.

A network may count its calls, anneal a temperature or a rate of dropout, and keep a state of its own, such as the
memory of a recurrent network. A loop may put on a hook for its training alone, such as a hook that adds noise to
embeddings, and take it off before the watch ends. A replay comes later, so it needs both as they were.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from mpcompare.verdict.examine.forced.module_hooks import is_recorders
from mpcompare.verdict.examine.unseen import Unseen

Attributes = dict[str, dict[str, Any]]  # by module and by name
Hooks = dict[str, dict[str, dict[int, Any]]]  # by module and by kind

MOST = 64  # leaves of nested lists, tuples and dicts
OF_OBJECT = object()
PLAIN = (bool, int, float, str, type(None))
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# A replay has its own values of these: its embeddings are dense, and its activations write nowhere.
OTHERS = frozenset(vars(nn.Module())) - {"training"} | {"sparse", "inplace"}
KINDS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip


def attributes_of(network: nn.Module, copied: Callable[[Tensor], Tensor]) -> Attributes:
    """Returns the numbers, texts, tensors and generators of each module, also in lists, tuples and dicts, and OF_OBJECT
    in the place of all else.

    Args:
        copied: makes the copies of tensors.
    """
    return {
        name: {
            key: _copy(value, copied) if _is_kept(value) else OF_OBJECT
            for key, value in vars(module).items()
            if key not in OTHERS
        }
        for name, module in network.named_modules()
    }


def set_attributes(network: nn.Module, attributes: Attributes, dtype: torch.dtype | None = None) -> None:
    """Sets the attributes of each module as they were, with tensors of real numbers in ``dtype``. Attributes that
    came later are removed, such as the mark of a network that puts hooks on itself in its first call."""

    def copied(t: Tensor) -> Tensor:
        return t.to(dtype, copy=True) if dtype is not None and t.is_floating_point() else t.clone()

    with Unseen():
        for name, module in network.named_modules():
            then, now = attributes.get(name, {}), vars(module)
            for key in now.keys() - OTHERS - then.keys():
                if _is_kept(now[key]):  # any other attribute is the replay's, such as a forced forward
                    del now[key]
            now.update({key: _copy(value, copied) for key, value in then.items() if value is not OF_OBJECT})


def attribute_of(network: nn.Module, tensor: Tensor) -> tuple[str, str, int] | None:
    """Returns the module and the attribute that hold a tensor, and its place there as in a flat list."""
    for name, module in network.named_modules():
        for attribute, value in vars(module).items():
            for place, leaf in enumerate(tree_leaves(value) if attribute not in OTHERS else ()):
                if leaf is tensor:
                    return name, attribute, place
    return None


def cached_of(network: nn.Module) -> int | None:
    """Returns how many weights of a network ``parametrize.cached`` keeps; None where nobody has entered it."""
    if not parametrize._cache_enabled:
        return None
    own = set(map(id, network.modules()))
    return sum(module in own for module, _ in parametrize._cache)


def _is_kept(value: Any) -> bool:
    if isinstance(value, PLAIN):
        return True
    leaves = tree_flatten(value)[0]
    kinds = (*PLAIN, *GENERATORS, Tensor)
    return len(leaves) <= MOST and all(isinstance(v, kinds) and not isinstance(v, nn.Parameter) for v in leaves)


def _copy(value: Any, copied: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, PLAIN):
        return value

    def leaf(v: Any) -> Any:
        if isinstance(v, Tensor):
            return copied(v.detach())
        if isinstance(v, torch.Generator):
            return v.clone_state()
        return copy.deepcopy(v) if isinstance(v, GENERATORS) else v

    return tree_map(leaf, value)


def hooks_of(network: nn.Module) -> Hooks:
    """Returns the hooks of all modules, without the hooks of a recorder."""
    return {
        name: {
            kind: {at: hook for at, hook in own.items() if not is_recorders(hook)} for kind, own in _of(module).items()
        }
        for name, module in network.named_modules()
        if any(_of(module).values())
    }


@contextmanager
def hooks_then(network: nn.Module, hooks: Hooks) -> Iterator[None]:
    """Gives a network these hooks, and no others, while it is entered. Each dict stays the same: the handle of a hook
    refers to it."""
    with ExitStack() as replaced:
        for name, module in network.named_modules():
            for kind, own in _of(module).items():
                replaced.enter_context(mock.patch.dict(own, hooks.get(name, {}).get(kind, {}), clear=True))
        yield


def _of(module: nn.Module) -> dict[str, Any]:
    """Returns the dicts of a module's hooks, by their kind; a compiled module has none."""
    return {kind: module.__dict__[kind] for kind in KINDS if kind in module.__dict__}
