"""Copies of outputs: a layer may make one of its outputs of another, and return both.

The gradient of the other output then has two parts. One comes from outside the layer, and only this part arrives at a
copy. A loop may mean all of it, as it does where it calls ``retain_grad``. Then the output stands for its copy.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import TensorBase
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from mpcompare.verdict.examine.forced.record import is_tracked

_GRAD, _RETAINS = vars(TensorBase)["grad"], vars(TensorBase)["retains_grad"]
_OF_GRADIENT = (
    Tensor.retain_grad, Tensor.register_hook, _RETAINS.__get__, _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__,
)  # fmt: skip
_BACKWARD = (Tensor.backward, torch.autograd.backward)

Edge = tuple[Any, int]  # a function of autograd's graph, and the number of one of its results


class Copies:
    """The copies that stand in the place of outputs."""

    def __init__(self) -> None:
        self._originals: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by copy the output

    def of(self, outputs: Sequence[Any], begins: int) -> list[Any]:
        """Returns the outputs of a call, with copies in the place of those that have gradients from within the layer,
        or from elsewhere.

        Args:
            begins: the number that autograd gives the first function of the call.
        """
        edges = {at: _edge(v) for at, v in enumerate(outputs) if is_tracked(v)}
        if len(edges) < 2 or not torch.is_grad_enabled():
            return list(outputs)
        used, times = _used(list(edges.values()), begins), Counter(edges.values())
        shared = {
            at for at, (node, place) in edges.items()
            if (node, place) in used or times[node, place] > 1 or not _is_made(node, begins)
        }  # fmt: skip
        return [self._copy(v) if at in shared else v for at, v in enumerate(outputs)]

    def _copy(self, output: Tensor) -> Tensor:
        copy = output.clone()
        self._originals[copy] = self._originals.get(output, output)
        return copy

    def stand_in(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments of a function of torch. Where it is about all of a gradient, they have outputs in the
        place of copies."""
        if len(self._originals) == 0:
            return args, kwargs
        if func in _OF_GRADIENT:
            return (self._original(args[0]), *args[1:]), kwargs
        if func is torch.autograd.grad and len(args) > 1:
            return (args[0], tree_map(self._original, args[1]), *args[2:]), kwargs
        if func in _BACKWARD and kwargs.get("inputs") is not None:
            return args, {**kwargs, "inputs": tree_map(self._original, kwargs["inputs"])}
        return args, kwargs

    def _original(self, value: Any) -> Any:
        """Returns the output of a copy; any other value as it is, and a copy that somebody has written into since."""
        found = self._originals.get(value) if isinstance(value, Tensor) else None
        is_same = found is not None and value.grad_fn is not None and value.grad_fn.next_functions == (_edge(found),)
        return found if is_same else value

    def end(self) -> None:
        """Gives the copies the gradients that a loop retains: from now on nothing stands for them."""
        with torch._C.DisableTorchFunction():
            for copy, original in self._originals.items():
                if original.retains_grad:
                    copy.retain_grad()
                    copy.grad = original.grad


def _edge(value: Tensor) -> Edge:
    node, place, *_ = get_gradient_edge(value)
    return node, place


def _used(ends: Sequence[Edge], begins: int) -> set[Edge]:
    """Returns the values of which the functions of a call make some values."""
    left, seen, used = [node for node, _ in ends], set[Any](), set[Edge]()
    while left:
        if (node := left.pop()) not in seen and _is_made(node, begins):
            seen.add(node)
            used.update(node.next_functions)
            left += [each for each, _ in node.next_functions]
    return used


def _is_made(node: Any, begins: int) -> bool:
    """Returns whether a function is one of a call, and no leaf."""
    return node is not None and node._sequence_nr() >= begins and not hasattr(node, "variable")
