"""The arithmetic of a replay, and the places at which the replay is compared.

A replay calls the network once. Its arithmetic says in which dtype that is computed and what is rounded on the way, and
is told of each comparison. The arithmetic here rounds nothing. ``samples.py`` has two others.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Point(NamedTuple):
    """A place at which a replay is compared. ``kind`` is ``input``, ``output``, ``gradient`` (the gradient that arrives
    at the output), ``back`` (the gradient that the layer passes down, which nobody recorded), ``parameter`` or
    ``buffer``. At the last two ``layer`` is the name of the tensor. ``whole``: the output is the network's. ``turn`` is
    the number of the backward pass through the call."""

    kind: str
    layer: str
    call: int = 0
    place: int = 0
    whole: bool = False
    turn: int = 0

    @property
    def name(self) -> str:
        """The name of all points of its kind at its layer, as in ``Layers.places``."""
        return f"{self.kind} {self.layer}"


class Arithmetic:
    """Everything in one dtype, and nothing is rounded.

    Attributes:
        dtype: the dtype in which the replay computes.
        is_exact: whether the differences from the record are the errors.
        kept: the part of the loss scale that gradients keep on their way through the network. With all of it, the
            numbers of backward are as large as in the step.
        storage: the format of the precision; None: nothing is rounded. A cast of the network to another format of 16
            bits is none of its roundings. An input of the network is an operand if its numbers have no more bytes: work
            on wider numbers, such as positions that autocast leaves in fp32, has no roundings of 16 bits.
        stores_all: whether ``stored`` is given each number above the output of the network, whatever its format.
        known: the layers that are not computed again, a :class:`KnownLayers`, or none.
    """

    is_exact = False
    kept = 1.0
    storage: torch.dtype | None = None
    stores_all = False
    known: Any = ()

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compare(self, point: Point, seen: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
        """Is told of a point: the recorded tensor, the replay's, and the dtype in which the first was seen."""

    def passing(self, part: str) -> None:
        """Is told which part of a micro-batch begins: ``forward``, ``loss``, ``backward`` of the network; and of a
        layer that computes ``constant`` numbers."""

    def whose(self, part: str, place: str) -> None:
        """Is told whose operators come next: ``forward`` or ``backward``, and a layer, or ``before LAYER`` for the work
        between layers, empty where the layer is not known yet; or no part, and the layer that begins."""

    def operand(self, operand: Tensor) -> Tensor:
        """Is given each operand of a layer, and of the work between layers. Returns the operand that is taken."""
        return operand

    def stored(self, value: Tensor) -> Tensor:
        """Is given each number of 16 bits above the output of the network. Returns the number that is taken."""
        return value

    def cast(self, constants: Tensor, kind: torch.dtype, roundings: int = 1) -> Tensor:
        """Is given constants that the network has in a format of 16 bits, and the number of their roundings. Returns
        the constants that are taken."""
        return constants

    def summed(self, part: Tensor) -> Tensor:
        """Is given the sum over several uses of a copy of a parameter after each use. Returns what is kept."""
        return part
