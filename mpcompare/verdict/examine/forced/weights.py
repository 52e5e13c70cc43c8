"""The parameters of a replay: a layer's parameters are cast when the layer computes, and freed when it has computed.

A copy of the network in float64 has twice the bytes of its parameters, and so have the operands of its layers. Only one
layer needs its operands at a time. Between forward and backward a parameter has only its place in autograd's graph.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from mpcompare.dtypes import HALF, as_complex
from mpcompare.tasks.functions import PRODUCTS
from mpcompare.tasks.task import Params, sharing_parameters
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic
from mpcompare.verdict.examine.forced.choices import Choosing, Line, in_backward, line_of_the_network
from mpcompare.verdict.examine.forced.constants import Narrow, are_met, with_constants
from mpcompare.verdict.examine.forced.instead import Instead
from mpcompare.verdict.examine.forced.kinks import on_their_side
from mpcompare.verdict.examine.forced.own_products import as_operands
from mpcompare.verdict.examine.forced.record import is_real
from mpcompare.verdict.examine.unseen import Unseen
from mpcompare.verdict.examine.widened import asked_of, call_widened, values_of

# Functions that ask a parameter for something other than its numbers.
ASKED = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__} | {
    vars(torch._C.TensorBase)[name].__get__
    for name in ("shape", "device", "requires_grad", "is_cuda", "is_leaf", "ndim", "layout")
}
DTYPE = vars(torch._C.TensorBase)["dtype"].__get__


class Weights(TorchFunctionMode):
    """Gives parameters in the dtype of a replay.

    While the mode is entered, a parameter that the network uses between its layers, such as a class token, is taken in
    this dtype, too. A network's own casts are widened, except for casts to the format of the precision.

    Attributes:
        names: the names of the parameters, by ``id``.
        between: by name the parameters that are used between layers, as leaves of autograd's graph.
        narrow: by line of code the constants that the step had in 16 bits.
        choosing: knows the operands that functions with kinks had in the step.
        asked: the formats of 16 bits that the network itself has asked for since somebody emptied it.
        own_backward: whether a backward method of the user's own is being called. Its casts are widened, too.
        moved: by name the numbers of parameters that the call of the network under way has in place of its own.
    """

    def __init__(
        self,
        network: nn.Module,
        arithmetic: Arithmetic,
        narrow: Mapping[Line, Narrow] | None = None,
        choosing: Choosing | None = None,
    ) -> None:
        super().__init__()
        self.arithmetic, self.dtype, self.narrow = arithmetic, arithmetic.dtype, narrow or {}
        self.choosing, self.names = choosing or Choosing(), {id(p): name for name, p in network.named_parameters()}
        self.held: Mapping[str, torch.dtype] = {}  # by name the dtypes in which the step held them
        self.autocast = False  # whether the step was under autocast
        self.between: dict[str, Tensor] = {}
        self.asked: set[torch.dtype] = set()
        self.moved: Params = {}
        self.own_backward = False
        self._halves: Mapping[Line, torch.dtype] = {}

    def multiplying_in(self, halves: Mapping[Line, torch.dtype]) -> AbstractContextManager[Any]:
        """Rounds the operands of products while it is entered, by line of code to the format of 16 bits there."""
        return mock.patch.object(self, "_halves", halves)

    def cast(self, p: Tensor, held: torch.dtype | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a new tensor of a parameter's numbers, as they are in the dtype ``held``, in ``dtype``; None: in the
        dtype of the replay."""
        with Unseen():
            own = self.numbers(p, held, self.moved)
            return own.to(as_complex(dtype or self.dtype, own), copy=True)

    def numbers(self, p: Tensor, held: torch.dtype | None, moved: Params) -> Tensor:
        """Returns a parameter's numbers, as they are in the dtype ``held``, in any dtype.

        Args:
            moved: by name the numbers that a call has in place of the parameters'.
        """
        name = self.names[id(p)]
        with Unseen():
            source = moved.get(name, self.between.get(name, p)).detach()
            return source.to(self.held.get(name, source.dtype)).to(held or source.dtype)

    def taken(self, value: Any) -> Any:
        """Returns a value that is used between layers: the leaf of a parameter, and any other value itself."""
        if not isinstance(value, nn.Parameter) or (name := self.names.get(id(value))) is None:
            return value
        if name not in self.between:
            with torch._C.DisableTorchFunction():
                self.between[name] = self.numbers(value, None, {}).to(as_complex(self.dtype, value), copy=True)
        leaf = self.between[name]
        if value.requires_grad:
            leaf.requires_grad_()  # it may have been frozen before
        elif leaf.requires_grad:
            leaf = leaf.detach()
        if name not in self.moved:
            return leaf
        return given if (given := self.moved[name]).requires_grad else Instead.apply(leaf, self.cast(value))

    def copied(self, value: Any) -> Any:
        """Returns a value that autocast casts to 16 bits. Nobody writes into this cast, though hooks may write into a
        parameter before backward."""
        taken = self.taken(value)
        return taken if taken is value or self.held.get(self.names[id(value)]) in HALF else taken.clone()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ASKED:
            return func(*args, **kwargs)
        # Within backward only a checkpoint takes gradients: it calls the network once more.
        if in_backward() and not torch.is_grad_enabled():
            return self._widely(func, args, kwargs) if self.own_backward else func(*args, **kwargs)
        if func == DTYPE and id(args[0]) in self.names:
            return self.dtype
        if any(id(v) in self.names for v in values_of(args, kwargs)):
            is_cast = self.autocast and func in PRODUCTS
            args, kwargs = tree_map_only(nn.Parameter, self.copied if is_cast else self.taken, (args, kwargs))
        narrow = self.narrow.get(line_of_the_network()) if self.narrow and are_met(args, kwargs) else None
        # The other format of 16 bits has no right errors, unless the network itself asks for it, as below.
        if narrow is not None and narrow.kind is self.arithmetic.storage:
            args, kwargs = with_constants(func, (args, kwargs), narrow, self.arithmetic.cast)
        if self._halves and func in PRODUCTS and (half := self._halves.get(line_of_the_network())) is not None:
            args, kwargs = as_operands((args, kwargs), half)
        if theirs := self.choosing.operands(func, (args, kwargs)):
            return on_their_side(func, (args, kwargs), theirs, self.choosing.rounded)
        self.asked |= (asked := asked_of(func, args, kwargs))
        result = self._widely(func, args, kwargs)
        is_constant = is_real(result) and not result.requires_grad
        return self.arithmetic.cast(result, asked.pop()) if asked and is_constant else result

    def _widely(self, func: Any, args: Any, kwargs: Any) -> Any:
        return call_widened(func, args, kwargs, self.dtype, self.arithmetic.storage)


def backward(ends: Sequence[Tensor], gradients: Sequence[Tensor | None], retains: bool = False) -> None:
    """Takes a backward that the modes see. Torch takes a mode off while it calls a function with tensors, and edges of
    a graph are no tensors to it. So the modes stay on if a checkpoint calls the network once more."""
    pairs = zip(ends, gradients, strict=True)
    given = [torch.ones_like(end) if g is None else g for end, g in pairs]
    torch.autograd.backward(list(map(get_gradient_edge, ends)), given, retain_graph=retains)


def in_dtype(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns a network with the same parameters, and with copies of the buffers. Buffers of real numbers are in this
    dtype."""
    copied = sharing_parameters(network)
    for module in copied.modules():
        for name, b in module._buffers.items():
            if b is not None and (b.is_floating_point() or b.is_complex()):
                module._buffers[name] = b.to(as_complex(dtype, b))
    return copied


def free(operand: Tensor) -> None:
    """Frees the numbers of an operand. The operand stays in autograd's graph, and so do tensors that share its numbers.

    An operand that is a part of a larger storage keeps its numbers. On a GPU a recurrent layer puts its weights, and so
    its operands, into one row for cuDNN. ``fill`` makes a storage that has room for one tensor."""
    storage = operand.untyped_storage()
    is_alone = storage.nbytes() == operand.numel() * operand.element_size()
    if is_alone and storage.resizable():  # a storage that numpy has seen is not; it is small
        storage.resize_(0)


def fill(operand: Tensor, numbers: Tensor, taken: Callable[[Tensor], Tensor]) -> None:
    """Puts back into a freed operand what ``taken`` returns of ``numbers``, which may be of another dtype."""
    if not (storage := operand.untyped_storage()).nbytes():
        with torch.no_grad():
            storage.resize_(operand.numel() * operand.element_size())
            operand.data.copy_(numbers)
            if (changed := taken(operand.detach())).data_ptr() != operand.data_ptr():
                operand.data.copy_(changed)
