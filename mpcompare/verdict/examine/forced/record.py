"""The record of one step: the inputs and the outputs of each call of each layer, and the gradients that reached them.

A layer is a module that calls no other module, or a norm that calls an activation of its own. Everything else that a
network computes is work between layers: it begins at recorded outputs and ends at recorded inputs. The output of the
network stands in the record as one more layer, ``(output)``, which hands on its input: above this layer is the loss.
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from mpcompare.operands import Products
from mpcompare.verdict.examine.forced.choices import Choice, Line
from mpcompare.verdict.examine.forced.constants import Narrow
from mpcompare.verdict.examine.forced.random_numbers import Drawn
from mpcompare.verdict.judge.replayed import OUTPUT as OUTPUT

LEVELS = 3  # an object may hold others: a distribution of independent rows holds the distribution of each number
CLOSED = (Tensor, nn.Module, type, ModuleType, FunctionType, bool, int, float, str, type(None))


def is_real(value: object) -> bool:
    """Returns whether a value is a tensor of real numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def is_tracked(value: object) -> bool:
    """Returns whether a value is a tensor of real numbers that requires a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in an object that torch's pytree does not open, such as an instance of a dataclass or a
    distribution: in its attributes, or in its items if it is a dict, in the order of their names. A tensor that is
    there twice is returned once. A tensor itself, and a module, hold none."""
    found: dict[int, Tensor] = {}
    met: dict[int, int] = {}  # by id how many levels within an object were looked at

    def look_into(each: Any, levels: int) -> None:
        if isinstance(each, Tensor):
            found.setdefault(id(each), each)
        if isinstance(each, CLOSED) or met.get(id(each), 0) >= levels:
            return
        met[id(each)] = levels
        if isinstance(each, (list, tuple, deque)) or type(each) is dict:
            inner, levels = list(each.values() if isinstance(each, dict) else each), levels + 1
        else:
            own = {**_attributes(each), **(each if isinstance(each, dict) else {})}
            inner = [own[name] for name in sorted(own, key=str)]
        for value in inner:
            look_into(value, levels - 1)

    if not isinstance(value, Tensor):
        look_into(value, LEVELS)
    return list(found.values())


def _attributes(value: Any) -> dict[Any, Any]:
    """Returns the attributes that an object holds itself. Its class computes none of them here: it may raise."""
    names = [name for kind in type(value).__mro__ for name in tree_leaves(vars(kind).get("__slots__", ()))]
    own = {}
    for name in ("__dict__", *names):
        with suppress(AttributeError):
            own[name] = object.__getattribute__(value, name)
    return {**own.pop("__dict__", {}), **own}


def leaves_of(nest: Any) -> list[Any]:
    """Returns the leaves of a nest, and then the tensors in those leaves that are objects."""
    leaves = tree_leaves(nest)
    return leaves + [t for leaf in leaves for t in tensors_in(leaf)]


@dataclass
class Call:
    """One call of a layer."""

    inputs: list[Any]  # the arguments as a flat list; tensors are copies
    outputs: list[Any] = field(default_factory=list)  # the result likewise
    spec: TreeSpec | None = None  # the nest of the result
    # the gradient of the scaled loss with respect to each output; None where none arrived
    gradients: list[Tensor | None] = field(default_factory=list)
    # by name the dtypes of the layer's parameters in this call
    held: dict[str, torch.dtype] = field(default_factory=dict)
    tracked: bool = False  # whether an input, or a parameter, requires a gradient
    passes: list[bool] = field(default_factory=list)  # whether each output requires a gradient
    begins: int = 0  # the number that autograd gives the first function of the call
    # where the numbers of each tensor that was given are in memory, and how often the tensor had been written to
    marks: set[tuple[int, int]] = field(default_factory=set)
    arguments: TreeSpec | None = None  # the nest of the arguments
    rectified: bool = False  # whether the outputs are known where they are positive, and are 0 elsewhere
    first: int = -1  # the number of the first backward pass; -1 before it
    # by the number of each further backward pass its gradients
    later: dict[int, list[Tensor | None]] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()  # the names of the layer's parameters that require a gradient in this call
    autocast: torch.dtype | None = None  # the dtype of autocast in the call; None where there was none
    # whether a reentrant checkpoint makes the call, and no argument of the checkpoint requires a gradient
    without: bool = False
    into: int | None = None  # the place of the input that the output was written into; None: a new output
    # the dtypes of the outputs where backward computed the call once more
    again: list[torch.dtype] = field(default_factory=list)
    # the choices that the network has made between its layers, and the operands of functions with kinks there; of a
    # layer that is not torch's own the operands of its functions with kinks
    choices: list[Choice] = field(default_factory=list)
    # by line of code the formats in which it multiplies; the network itself, between its layers
    products: dict[Line, set[torch.dtype]] = field(default_factory=lambda: defaultdict(set))

    @property
    def places(self) -> list[Tensor]:
        """The places that it returned, such as the experts that a router chose."""
        return [v for v in self.outputs if isinstance(v, Tensor) and v.dtype is torch.int64]

    @property
    def near(self) -> float:
        """The relative difference of two numbers that agree in half of the digits of the call."""
        formats = [v.dtype for v in (*self.inputs, *self.outputs) if is_real(v)]
        formats += [self.autocast] if self.autocast else []
        return math.sqrt(max((torch.finfo(each).eps for each in formats), default=0.0))

    def gradients_of(self, number: int) -> list[Tensor | None]:
        """Returns the gradients of a backward pass, to be filled in, by its number."""
        if self.first < 0:
            self.first = number
        return self.gradients if number == self.first else self.later.setdefault(number, [None] * len(self.outputs))

    def of_passes(self, passes: Collection[int]) -> "Call":
        """Returns the call with the gradients of some backward passes alone."""
        nothing: list[Tensor | None] = [None] * len(self.outputs)
        found = {self.first: self.gradients, **self.later}
        gradients = next((g for number, g in found.items() if number in passes), nothing)
        return replace(self, gradients=gradients, later={})


@dataclass
class Record:
    """A recorded step."""

    # by name of the layer, in the order of its calls
    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    drawn: Drawn = field(default_factory=dict)  # the random numbers that the step drew
    narrow: dict[Line, Narrow] = field(default_factory=dict)  # by line of code the constants of 16 bits
    # the buffers that were written in calls of the network that are no part of the step, such as a count of calls
    aside: set[str] = field(default_factory=set)
    hidden: str = ""  # why the calls cannot be replayed; empty where they can


def calls_of(products: Products, inputs: Sequence[Tensor]) -> dict[str, list[Call]]:
    """Returns the calls of the layers of a step whose products were noted, and the calls of the network.

    Args:
        inputs: the inputs of each micro-batch.
    """
    shown = products.shown()
    flat = tree_flatten(torch.zeros(()))[1]
    calls = {
        name: [
            Call([o.input], [o.output], flat, [o.gradient], tracked=True, passes=[True], rectified=o.rectified)
            for o in operands
        ]
        for name, operands in shown.items()
    }
    arguments = tree_flatten(((inputs[0],), {}))[1]
    first, last = (list(shown.values())[end] for end in (0, -1))
    calls[OUTPUT] = [
        Call([z.input.view(x.shape)], [a.output], flat, [a.gradient], tracked=True, passes=[True], arguments=arguments)
        for x, z, a in zip(inputs, first, last, strict=True)
    ]
    return calls
