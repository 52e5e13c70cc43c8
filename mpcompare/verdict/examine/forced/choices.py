"""The choices that a network makes, such as a router that chooses experts.

A rounding may change the choice between two numbers that are nearly equal: another expert, another box. Then other rows
come to a layer, and the step cannot be compared. So a choice between layers is written down, and a replay makes it
again. A layer may be a router itself: it chose the places that it returned.
"""

import math
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mpcompare.dtypes import HALF, dtype_name
from mpcompare.precision import FP16
from mpcompare.verdict.examine.forced.attention_masks import bound
from mpcompare.verdict.examine.forced.kinks import nearest, operands, operator_of
from mpcompare.verdict.examine.numerics import spread
from mpcompare.verdict.examine.unseen import Unseen

FEW = 256  # numbers of a choice that tell how many digits the numbers have
COMPARISONS = {f"aten::{name}" for name in ("gt", "ge", "lt", "le", "eq", "ne")}
# operators that choose numbers along a dimension, and return their places
ALONG = {f"aten::{name}" for name in ("topk", "sort", "max", "min", "argmax", "argmin")}
NMS = "torchvision::nms"  # returns the boxes that overlap little with better boxes: any number of boxes
OTHERS = {"aten::_to_copy", "aten::bucketize", "aten::searchsorted", NMS}  # casts to whole numbers, and intervals
CHOICES = COMPARISONS | ALONG | OTHERS

NOT_THE_NETWORK = ("torch.", "mpcompare.verdict.", "mpcompare.watching.")  # packages of its callers and of modes
OF_MODES = {"__torch_function__", "__torch_dispatch__"}  # methods of modes of anybody's, such as a backend's
Line = tuple[str, int]  # a file, and the number of a line in it
Place = tuple[str, int, str]  # file, line, and operator


_beside: list[int] = []  # the numbers of the backward passes under way that do not come to the network; 0: not known


def in_backward() -> bool:
    """Returns whether autograd is at work in the network: a checkpoint calls layers once more there."""
    number = torch._C._current_graph_task_id()
    if number != -1 and _beside and not _beside[-1]:
        _beside[-1] = number
    return number != -1 and number not in _beside


@contextmanager
def beside_the_network() -> Iterator[None]:
    """The next backward does not come to the network. What a hook calls in it is called as outside of any."""
    _beside.append(0)
    try:
        yield
    finally:
        _beside.pop()


@dataclass(frozen=True)
class Choice:
    """One choice of a step."""

    place: Place
    chosen: Tensor  # the places or truth values; of a function with kinks an operand
    by: torch.dtype  # the dtype of the numbers that it was made by
    numbers: Tensor  # some of these numbers; none where their digits do not matter


def chosen(args: Any, result: Any) -> Tensor | None:
    """Returns the places or truth values that an operator of CHOICES chooses by real numbers; None where it chooses
    nothing."""
    made = result[-1] if isinstance(result, (tuple, list)) else result
    is_real = isinstance(args[0], Tensor) and args[0].is_floating_point()
    return made if is_real and not made.is_floating_point() and not made.is_complex() else None


def numbers_of(args: Any) -> Tensor:
    """Returns some of the numbers that an operator chooses by. It returns none where the digits of a number do not
    matter: in a comparison with infinity, or of numbers with themselves as for NaN."""
    numbers, other = (*args, None)[:2]
    in_digits = other is not numbers and not (isinstance(other, float) and math.isinf(other))
    return spread(numbers, FEW) if in_digits else torch.empty(0)


def line_of_the_network() -> Line:
    """Returns the line in the code of the network that calls an operator. The operator may call itself by code in
    Python, as autocast's kernel for it does: that is no part of the network."""
    found: Line | None = None
    for frame, line in walk_stack(sys._getframe(1)):
        package = frame.f_globals.get("__name__", "")
        if package == "torch._ops":
            found = None
        elif found is None and not (package.startswith(NOT_THE_NETWORK) or frame.f_code.co_name in OF_MODES):
            found = frame.f_code.co_filename, line
    return found or ("", 0)


def made_by(choices: Iterable[Choice], off: Mapping[Place, float], storage: torch.dtype) -> dict[str, str]:
    """Returns by place, in words, the format whose digits the numbers of its choices have; of several formats the
    shortest one. Numbers in fp32 may be made of 16-bit numbers, as distances are, and numbers of 16 bits may be exact,
    as a mask is. So numbers that are further off than halfway between both roundings have 16 bits.

    Args:
        off: by place how far the numbers are off, as :attr:`Choosing.off`; a place that is left out has the dtype's.
        storage: the format of the precision.
    """
    found: dict[str, torch.dtype] = {}
    halfway = math.sqrt(torch.finfo(storage).eps * torch.finfo(torch.float32).eps) / 2
    for choice in sorted(filter(lambda each: len(each.numbers), choices), key=lambda each: -each.by.itemsize):
        file, line, operator = choice.place
        kind, is_half = choice.by, choice.by in HALF
        if storage in HALF and choice.place in off and is_half != (off[choice.place] > halfway):
            kind = torch.float32 if is_half else storage
        found[f"{operator.rpartition(':')[2]} in {file.rpartition('/')[2]}:{line}"] = kind
    return {place: dtype_name(dtype) for place, dtype in found.items()}


def how_far(numbers: Tensor, exact: Tensor) -> float:
    """Returns how far some numbers are off, relative to their norm. Numbers beyond fp16 are no numbers of a choice:
    they stand for infinity in a mask."""
    counts = (numbers.abs() < FP16.maximum) & (exact.abs() < FP16.maximum)
    numbers, exact = numbers[counts].double(), exact[counts].double()
    norm = float(exact.norm())
    return float((numbers - exact).norm()) / norm if norm else 0.0


def along(func: Any, args: Any, kwargs: Any, result: Any, places: Tensor, near: float) -> Any:
    """Returns the result of an operator of ALONG with other places, if the numbers there differ from the numbers that
    it has chosen by a share ``near`` of them at most; else the result itself.

    Args:
        places: the other places, of the shape of the operator's own.
    """
    given, values = bound(func, args, kwargs), isinstance(result, (tuple, list))
    own = result[-1] if values else result
    row, dim = given["self"], given.get("dim", -1 if values else None)
    if dim is None:  # the place of the largest number of all
        row, dim = row.flatten(), 0
    is_kept = own.dim() == row.dim()
    numbers = [row.gather(dim, at if is_kept else at.unsqueeze(dim)) for at in (places, own)]
    theirs, ours = numbers if is_kept else [each.squeeze(dim) for each in numbers]
    alike = (theirs - ours).abs() <= near * torch.maximum(theirs.abs(), ours.abs())
    if not bool((alike & theirs.isfinite() | (theirs == ours)).all()):
        return result
    return (theirs, places) if values else places


def _compared(args: Any, own: Tensor, theirs: Tensor, near: float) -> Tensor:
    """Returns the noted truth values of a comparison, ``theirs``. Where they differ from its own, the two numbers must
    differ by a share ``near`` of the largest number at most; else its own are returned."""
    with Unseen():
        first, second = (torch.as_tensor(each) for each in args[:2])
        finite = [each[each.isfinite()].abs() for each in (first, second)]
        largest = max((float(each.max()) for each in finite if each.numel()), default=0.0)
        return theirs if bool(((own == theirs) | ((first - second).abs() <= near * largest)).all()) else own


def _by_place(noted: Iterable[Choice]) -> dict[Place, deque[Choice]]:
    found: dict[Place, deque[Choice]] = defaultdict(deque)
    for choice in noted:
        found[choice.place].append(choice)
    return found


class Choosing:
    """Makes the choices of a recorded call of a network once more.

    Attributes:
        off: by place how far the numbers of its choices were off in the step, at most, relative to their norm.
    """

    def __init__(self) -> None:
        self.off: dict[Place, float] = {}
        self._left: dict[Place, deque[Choice]] = {}  # by place the choices that come next
        # by place the choices that differed from the replay's own, with the own ones: a checkpoint makes them again
        self._made: dict[Place, list[tuple[Tensor, Tensor]]] = {}
        self._operands: dict[Place, list[Tensor]] = defaultdict(list)  # the operands of functions with kinks so far
        self._near = 0.0
        self._returned: Sequence[Tensor] | None = None  # the places that the layer returned; None between layers

    @contextmanager
    def of(self, noted: Sequence[Choice], near: float) -> Iterator[None]:
        """Makes these choices, in their order, where the numbers agree within a share ``near`` of them."""
        self._near = near  # later, too: in backward a checkpoint makes the choices again
        with mock.patch.object(self, "_left", _by_place(noted)):
            yield

    @contextmanager
    def within(
        self, returned: Sequence[Tensor] = (), near: float = 0.0, noted: Sequence[Choice] = ()
    ) -> Iterator[None]:
        """Lets a layer choose the k largest numbers of a row as it did while it is entered, and stay on its side of
        each kink.

        Args:
            returned: the places that the layer returned.
            near: the part of the numbers by which they may be apart.
            noted: the operands of its functions with kinks.
        """
        with mock.patch.multiple(self, _returned=returned, _near=near, _left=_by_place(noted)):
            yield

    def again(self, func: Any, given: Any, result: Any) -> Any:
        """Returns the result of an operator of CHOICES as it was in the step."""
        args, kwargs = given
        if self._returned is not None:
            for places in self._returned if func is torch.ops.aten.topk.default else ():
                if places.shape == result[0].shape:
                    again = along(func, args, kwargs, result, places, self._near)
                    if again is not result:
                        return again
            return result
        source = self._made if in_backward() else self._left
        if not source or (own := chosen(args, result)) is None:
            return result
        name = func._schema.name
        place = *line_of_the_network(), name
        theirs = self._next(place, own, args[0])
        if theirs is None or theirs.dtype is not own.dtype or torch.equal(theirs, own):
            return result
        if theirs.shape != own.shape and name != NMS:
            return result
        if not in_backward():
            self._made.setdefault(place, []).append((own.clone(), theirs))
        theirs = theirs.clone()  # the network may write into it
        if name in ALONG:
            return along(func, args, kwargs, result, theirs, self._near)
        return _compared(args, own, theirs, self._near) if name in COMPARISONS else theirs

    @property
    def rounded(self) -> float:
        """The part of the largest number by which roundings move a number of the step at most: a unit in the last
        place of the step's format."""
        return self._near**2

    def operands(self, func: Any, given: Any) -> list[Tensor]:
        """Returns the operands that a function with kinks had in the step; none for other functions.

        Args:
            given: the arguments that the replay gives the function, without names and with them.
        """
        is_within = self._returned is not None
        if (is_within and not self._left) or not (name := operator_of(func)):
            return []
        own, place = operands(given), (*line_of_the_network(), name)
        if in_backward() and not is_within:  # a checkpoint calls it once more
            theirs = [nearest(y, self._operands[place]) for y in own]
        else:
            left = self._left.get(place, deque())
            theirs = [left.popleft().chosen for _ in own[: len(left)]]
            if not is_within:
                self._operands[place] += theirs
        # An operand that was not noted is the output of a layer, which the replay has as it was.
        found = [x if x.numel() == y.numel() else y for x, y in zip(theirs, own, strict=False)]
        return found if len(found) == len(own) and any(x is not y for x, y in zip(found, own, strict=True)) else []

    def _next(self, place: Place, own: Tensor, exact: Tensor) -> Tensor | None:
        """Returns the choice of the step that comes next at a place, where the replay chooses by the numbers ``exact``;
        None where there is none."""
        if in_backward():
            return next((theirs for mine, theirs in self._made.get(place, ()) if torch.equal(mine, own)), None)
        if not (left := self._left.get(place)):
            return None
        choice = left.popleft()
        with Unseen():
            numbers = spread(exact, FEW)
            if numbers.shape == choice.numbers.shape:
                self.off[place] = max(self.off.get(place, 0.0), how_far(choice.numbers, numbers))
        return choice.chosen
