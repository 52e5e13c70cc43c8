"""A batch whose inputs, targets or outputs are several tensors: a nest of them that is sliced and cast like one.

Most networks map a tensor to a tensor. Others are called with several (ids and a mask), or return several (logits and a
loss), in tuples, dicts and dataclasses. Everything here that handles a batch takes rows of it, moves it, casts it and
hands it on. A :class:`Tree` does all this as a tensor does, on all of its tensors, so that no backend and no pass knows
the nest. A tree is opened at two doors: the network is called with ``*x`` or ``**x`` (:func:`take_trees`), and the loss
gets what the network returned (:class:`OfTrees`). Where all are tensors there are no doors, and nothing costs more.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpcompare.tasks.losses import Loss, count_of


@dataclass(frozen=True, eq=False)
class Tree:
    """A nest of tensors. A row of the nest is that row of every tensor.

    Only floating numbers are cast. Values in a nest that are no tensors stay as they are.
    """

    value: Any  # the nest, as the network takes or returns it

    def map(self, change: Callable[[Tensor], Tensor]) -> "Tree":
        """Returns the nest with each tensor changed."""
        return Tree(pytree.tree_map_only(Tensor, change, self.value))

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(self.value) if isinstance(leaf, Tensor)]

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: Any) -> "Tree":
        return self.map(lambda t: t[rows])

    def split(self, rows: int) -> list["Tree"]:
        return [self[first : first + rows] for first in range(0, len(self), rows)]

    def flip(self, dim: int) -> "Tree":
        return self.map(lambda t: t.flip(dim))

    def to(self, where: Any) -> "Tree":
        if isinstance(where, torch.dtype):
            return self.map(lambda t: t.to(where) if t.is_floating_point() else t)
        return self.map(lambda t: t.to(where))

    def float(self) -> "Tree":
        return self.to(torch.float32)

    def double(self) -> "Tree":
        return self.to(torch.float64)

    def detach(self) -> "Tree":
        return self.map(Tensor.detach)

    def clone(self) -> "Tree":
        return self.map(Tensor.clone)

    def cpu(self) -> "Tree":
        return self.map(Tensor.cpu)

    def is_floating_point(self) -> bool:
        return any(t.is_floating_point() for t in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype of numbers with a point: a network in 16 bits may return its loss in fp32."""
        return min((t.dtype for t in self.tensors if t.is_floating_point()), key=lambda dtype: dtype.itemsize)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def requires_grad(self) -> bool:
        return any(t.requires_grad for t in self.tensors)

    def numel(self) -> int:
        return sum(t.numel() for t in self.tensors)


Batch = Tensor | Tree

pytree.register_pytree_node(Tree, lambda tree: ([tree.value], None), lambda values, _: Tree(*values))
torch.serialization.add_safe_globals([Tree])


def tensors_of(batch: Batch) -> list[Tensor]:
    """Returns the tensors of inputs, targets or outputs."""
    return batch.tensors if isinstance(batch, Tree) else [batch]


def named(name: str, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors, each with the way to it: ``x_train['input_ids']``."""
    if isinstance(batch, Tree):
        for path, leaf in pytree.tree_flatten_with_path(batch.value)[0]:
            if isinstance(leaf, Tensor):
                yield name + pytree.keystr(path), leaf
    else:
        yield name, batch


def each(change: Callable[..., Tensor], *batches: Any) -> Any:
    """Applies ``change`` to one batch or to several, tensor by tensor; returns the result."""
    if not isinstance(batches[0], Tree):
        return change(*batches)

    def changed(*leaves: Any) -> Any:
        return change(*leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    return Tree(pytree.tree_map(changed, *(batch.value for batch in batches)))


def nbytes(*batches: Batch) -> int:
    """Returns the bytes of all tensors. A tensor that is input and target counts once, and so does one of which the
    other is the beginning."""
    tensors = sorted((t for batch in batches for t in tensors_of(batch)), key=lambda t: t.nbytes)
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())  # the largest at an address


class OfTrees:
    """A loss that takes the nests themselves: the network's output as it is, and the targets as the data has them."""

    def __init__(self, loss: Loss, name: str) -> None:
        self.loss, self.__name__ = loss, name

    def __call__(self, output: Any, y: Any) -> Tensor:
        return self.loss(_nest(output), _nest(y))

    @property
    def count(self) -> Callable[[Any], Tensor] | None:
        """The function that counts the labels; None where all targets count alike."""
        counts = count_of(self.loss)
        return None if counts is None else lambda y: counts(_nest(y))


def _nest(batch: Any) -> Any:
    return batch.value if isinstance(batch, Tree) else batch


def take_trees(network: nn.Module, inputs: bool, outputs: bool) -> None:
    """Lets a network be called with a :class:`Tree`, or return a tree. The doors are hooks of the network: all of its
    copies have them, too."""
    if inputs and _opened not in network._forward_pre_hooks.values():
        network.register_forward_pre_hook(_opened, with_kwargs=True)
    if outputs and _closed not in network._forward_hooks.values():
        network.register_forward_hook(_closed)


def returns_trees(network: nn.Module) -> bool:
    """Returns whether a network returns several tensors, its loss perhaps among them."""
    return _closed in network._forward_hooks.values()


def without_doors(network: nn.Module) -> nn.Module:
    """Takes the doors away from a network, which then takes and returns what its author wrote."""
    for hooks, door in ((network._forward_pre_hooks, _opened), (network._forward_hooks, _closed)):
        for number in [number for number, hook in hooks.items() if hook is door]:
            del hooks[number]
            network._forward_pre_hooks_with_kwargs.pop(number, None)
    return network


def _opened(_: nn.Module, args: Any, kwargs: Any) -> Any:
    if len(args) != 1 or not isinstance(args[0], Tree):
        return None
    value = args[0].value
    if isinstance(value, dict):
        return (), {**kwargs, **value}
    return (tuple(value) if isinstance(value, (tuple, list)) else (value,)), kwargs


def _closed(_: nn.Module, __: Any, output: Any) -> Any:
    return None if isinstance(output, Tensor) else tree_of(output)


def tree_of(output: Any) -> Tree:
    """Returns the tree of a nest, whose dataclasses torch may not know yet."""
    if dataclasses.is_dataclass(output) and type(output) not in pytree.SUPPORTED_NODES:
        pytree.register_dataclass(type(output))
    return Tree(output)
