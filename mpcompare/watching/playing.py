"""The functions that a loop called, played again with other values: what it computed of its network's outputs."""

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mpcompare.dtypes import HALF
from mpcompare.tasks.functions import PRODUCTS
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic
from mpcompare.verdict.examine.forced.instead import Instead
from mpcompare.verdict.examine.forced.kernels import functions_of
from mpcompare.verdict.examine.forced.own_products import as_operands
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError
from mpcompare.verdict.examine.forced.record import is_real
from mpcompare.verdict.examine.forced.replay import Replay
from mpcompare.verdict.examine.widened import CASTS
from mpcompare.watching.events import Op, Own, Slot


class NotInFloat64Error(Exception):
    """A function of the user's own cannot be called with numbers in float64. The message is its name."""


class Player(Replay):
    """A replay that also plays functions of the loop.

    Attributes:
        written: the values into which functions write.
        uses: how many functions, and calls of the network, use each value.
    """

    written: set[Slot]
    uses: Counter[Slot]

    def play(self, op: Op, values: dict[Slot, Tensor], rounds: bool = False, within: Collection[str] = ()) -> None:
        """Calls a function again, with the values that it is given here.

        Args:
            rounds: whether the operators that it calls may round their results, as the operators of layers do.
            within: the operators that may round, where not all may.
        """
        if op.state is not None:
            op.generator.set(op.state)
        leaves = [self.leaf(leaf, values) for leaf in op.leaves]
        if set(HALF).isdisjoint(op.dtypes):  # each use gives a value of 16 bits a gradient of 16 bits, and these add up
            used = [isinstance(leaf, Slot) and leaf is not op.writes and self.uses[leaf] > 1 for leaf in op.leaves]
            parts = zip(leaves, op.given, used, strict=True)
            leaves = [_Used.apply(v, self.arithmetic) if more and d in HALF else v for v, d, more in parts]
        args, kwargs = tree_unflatten(leaves, op.spec)
        if op.func in PRODUCTS and (half := next((dtype for dtype in op.dtypes if dtype in HALF), None)) is not None:
            args, kwargs = as_operands((args, kwargs), half)  # autocast rounds the weights of a frozen network, too
        if isinstance(op.func, type):
            result = self._own(op.func, args)
        elif op.differentiates:
            self.loss_is_rounded = True
            self.arithmetic.passing("backward")
            result = op.func(*tree_map(self.weights.taken, args), **tree_map(self.weights.taken, kwargs))
            self.arithmetic.passing("loss")
        else:
            is_cast = op.func in CASTS or op.func is Tensor.double
            with _Within(within, self.arithmetic.passing) if within else nullcontext():
                # a cast makes new numbers, into which the loop may write
                result = args[0].to(self.dtype, copy=bool(self.written)) if is_cast else op.func(*args, **kwargs)
        found = tree_flatten(result)[0]
        if (rounds or within) and op.writes is None:
            self._round_within(list(filter(is_real, found)), [leaf for leaf in leaves if is_real(leaf)])
        for slot, value, dtype in zip(op.results, found, op.dtypes, strict=True):
            if slot is not None:
                is_stored = (dtype in HALF or (self.arithmetic.stores_all and is_real(value))) and op.writes is None
                # A value may be written into later, or a view of it. Then it must not be a view that a function of ours
                # made, nor the base of such a view. A view has the numbers of its base, which are stored.
                is_stored &= not (self.written and is_real(value) and value._is_view())
                stored = _Stored.apply(value, self.arithmetic) if is_stored else value
                values[slot] = stored.clone() if is_stored and self.written else stored

    def _round_within(self, results: list[Tensor], given: list[Tensor]) -> None:
        """Lets the operators of backward round within a function that calls several, such as a function that normalizes
        rows. Terms that are rounded cancel there, and the rest is passed down."""
        above = {value.grad_fn._sequence_nr() for value in given if value.grad_fn is not None}
        nodes = [node for node in functions_of(results, above) if not hasattr(node, "variable")]
        for node in nodes if len(nodes) > 1 else ():
            node.register_prehook(lambda _: self.arithmetic.passing("backward"))
            node.register_hook(lambda _, __: self.arithmetic.passing("loss"))

    def _own(self, function: type[Function], args: Any) -> Any:
        """Calls a function of the user's own, which may round each of its results as a layer does."""
        self.arithmetic.passing("forward")
        try:
            result = function.apply(*map(self.weights.taken, args))
        except Exception as error:
            raise NotInFloat64Error(function.__name__) from error
        self.arithmetic.passing("loss")
        for node in {value.grad_fn for value in tree_flatten(result)[0] if is_real(value)} - {None}:
            node.register_prehook(lambda _: self.arithmetic.passing("backward"))
            node.register_hook(lambda _, __: self.arithmetic.passing("loss"))
        return result

    def leaf(self, leaf: Any, values: dict[Slot, Tensor]) -> Any:
        """Returns what stands in a replay in the place of an argument of the loop.

        values: the values of the replay so far. A value that the loop had before is added to them.
        """
        if isinstance(leaf, Slot):
            if leaf not in values:
                if leaf.first is None:
                    raise NotReplayedError("the loop goes on from values that it had before these gradients")
                values[leaf] = self._constant(leaf.first).clone().requires_grad_(leaf.is_leaf)
            return values[leaf]
        if isinstance(leaf, Own):
            return self.network.get_parameter(leaf.name)
        if isinstance(leaf, torch.dtype) and leaf.is_floating_point:
            return self.dtype
        return self._constant(leaf) if isinstance(leaf, Tensor) else leaf

    def _constant(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if is_real(value) else value


class _Within(TorchDispatchMode):
    """Lets some operators of a function round their results, as the operators of layers do, and others not."""

    def __init__(self, names: Collection[str], passing: Callable[[str], None]) -> None:
        super().__init__()
        self.names, self.passing = names, passing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rounds = func._schema.name.partition("::")[2] in self.names
        self.passing("forward" if rounds else "loss")
        result = func(*args, **(kwargs or {}))
        self.passing("loss")
        return result


class _Used(torch.autograd.Function):
    """One use of a number that the loop kept in 16 bits. The gradient of the use is kept in 16 bits, too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, arithmetic: Arithmetic) -> Tensor:
        ctx.arithmetic = arithmetic
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Instead.apply(grad, ctx.arithmetic.stored(grad.detach())), None


class _Stored(torch.autograd.Function):
    """A number that the loop kept in 16 bits, and its gradient; or a number of any format, whose terms are counted."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, arithmetic: Arithmetic) -> Tensor:
        ctx.arithmetic, ctx.value = arithmetic, value.detach() if arithmetic.stores_all else None
        return arithmetic.stored(value).view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.value is not None:
            ctx.arithmetic.squares += float((ctx.value * grad.detach()).abs().square().sum())
        return Instead.apply(grad, ctx.arithmetic.stored(grad.detach())), None
