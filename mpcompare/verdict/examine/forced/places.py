"""The error of a recorded step at each place, and the size of the errors that roundings alone make there.

Roundings are known from samples, and their norms from some elements of each tensor.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpcompare.dtypes import HALF
from mpcompare.verdict.examine.forced.arithmetic import Point
from mpcompare.verdict.examine.forced.roundings import Roundings
from mpcompare.verdict.examine.numerics import CHUNK, chunks, contrasts, dimensions, distance, finite_norm, stride_of
from mpcompare.verdict.judge.errors import GradientError, PlaceError, RoundingError
from mpcompare.verdict.judge.limits import K, largest_rounding

BLIND = 0.02  # of the norm of a tensor: a few samples are enough if roundings are below it
ELEMENTS = {"parameter": 1 << 16}  # the number of elements of a tensor that tell how large roundings are
FEW = 1 << 12  # the number for any other kind of tensor
FP32 = 2.0**-24
SMALLEST = 2.0**-126  # the smallest normal number of fp32, and of bf16


@dataclass(frozen=True)
class Some:
    """Some elements of a tensor that tell how large the norm of its roundings is: the largest, because a few of them
    may make most of the norm, and some others, each of which stands for several elements.
    """

    at: Tensor | None = None  # their places in the tensor as one row; None where these are all its elements
    root: Tensor | None = None  # the root of the number of elements that each stands for

    @classmethod
    def of(cls, tensor: Tensor, most: int) -> "Some":
        """Returns at most about so many elements of a tensor."""
        if tensor.numel() <= most:
            return cls()
        row = tensor.flatten()
        evenly = torch.arange(0, len(row), stride_of(tensor, most // 2), device=row.device)
        sizes = row[evenly].abs()
        # About half of ``most`` elements are above this number, as elements at even distances tell. This needs no sort.
        beyond = sizes.kthvalue(len(sizes) - len(sizes) * len(sizes) // len(row)).values
        pieces = [(each.abs() > beyond).nonzero().flatten() + CHUNK * at for at, (each,) in enumerate(chunks(row))]
        largest = torch.cat(pieces)
        if len(largest) > most // 2:
            largest = largest[row[largest].abs().topk(most // 2).indices]
        left = torch.ones(len(row), dtype=torch.bool, device=row.device)
        left[largest] = False
        others = evenly[left[evenly]]
        root = torch.ones(len(largest) + len(others), dtype=torch.float64, device=row.device)
        root[len(largest) :] = math.sqrt((len(row) - len(largest)) / max(len(others), 1))
        return cls(torch.cat([largest, others]), root)

    def taken(self, tensor: Tensor) -> Tensor:
        """Returns a copy of these elements, in one row."""
        return tensor.flatten().clone() if self.at is None else tensor.flatten()[self.at]

    def weighed(self, values: Tensor) -> Tensor:
        """Returns values of these elements, weighed so that the row has about the norm of the whole tensor."""
        return values if self.root is None else values * self.root

    def count(self, which: Tensor) -> float:
        """Returns of how many elements of the tensor something is true."""
        return float(which.sum() if self.root is None else self.root[which].square().sum())


class Place:
    """One place: the error of the record, and the errors that roundings alone make there.

    Args:
        known: the error of the record, if it is a gradient.

    Attributes:
        error, norm: how far the recorded tensor is from the exact one, and the norm of the exact one.
        dtype: the dtype in which it was recorded.
    """

    def __init__(
        self, point: Point, seen: Tensor, exact: Tensor, dtype: torch.dtype, known: GradientError | None = None
    ) -> None:
        self.kind, self.dtype = point.kind, dtype
        if known is not None and math.isfinite(known.error):
            self.error, self.norm = known.error, known.norm
        else:
            self.error, self.norm = distance({"": seen}, {"": exact}), finite_norm({"": exact})
        if not math.isfinite(self.error):
            # A gradient may overflow where nobody needs it, such as at a padding token, or below a ReLU that is off:
            # the gradients of the parameters are finite here.
            stored = seen if point.kind == "gradient" else exact.to(dtype).to(exact.dtype)
            self.error = distance({"": seen}, {"": torch.where(stored.isinf(), stored, exact)})
        self._some = Some.of(exact, ELEMENTS.get(point.kind, FEW))
        self._exact = self._some.taken(exact)
        if point.kind == "parameter":  # it may have come in fp32
            self._exact = self._exact.double()
        self._size, self._present = float(self._exact.norm()), self._exact != 0
        self._samples: list[Tensor] = []
        self._zeros = self._terms = 0.0  # elements that became 0, of all samples; how large the terms of sums are
        # The elements of a parameter's recorded gradient that are 0 where the exact ones are not, and how far roundings
        # move each element of the gradient at most; None where there are no such elements.
        self._lost: tuple[Tensor, Tensor] | None = None
        if point.kind == "parameter" and bool((lost := (self._some.taken(seen) == 0) & self._present).any()):
            self._lost = lost, torch.zeros_like(self._exact, dtype=torch.float64)
        self._known: RoundingError | None = None

    def in_common(self, seen: Tensor, again: Tensor) -> float:
        """Returns how much of the error a replay in fp32 makes, too. It is at least as far from the exact tensor as the
        record is, less the distance between both (triangle inequality)."""
        return max(self.error - distance({"": seen}, {"": again}), 0.0)

    def sample(self, roundings: Roundings, exact: Tensor | None) -> None:
        """Writes down how far the exact tensor is moved by roundings; it is rounded once more as it is stored.

        Args:
            exact: the tensor that the operations of a sample make; None: they round the exact tensor once.
        """
        right = self._exact
        some = roundings.round_(right.clone()) if exact is None else self._some.taken(exact.detach())
        moved = some.double() - right
        if not math.isfinite(size := float(torch.linalg.vector_norm(moved))):
            # A sample that divides by a number that it has rounded to 0 tells only how a number is stored.
            some = torch.where(some.isfinite(), some, right.to(some.dtype))
            moved = some.double() - right
            size = float(torch.linalg.vector_norm(moved))
        # Gradients are summed before they are stored. Numbers that an operator selected, or that no operand of 16 bits
        # moves, are rounded as they are stored. In fp32 the replay moves such numbers a little, too.
        rounded = size > roundings.u / 16 * self._size
        stored = self.dtype in HALF and (self.kind in ("gradient", "parameter") or roundings.constant or not rounded)
        if stored:
            some = roundings.round_(some)
            moved = some.double() - right
        lost = some == 0
        if stored and self.kind == "parameter":  # the zeros of such gradients are judged
            # Roundings of terms that cancel hide that the exact number is too small for the format.
            lost |= roundings.round_(right.clone()) == 0
        self._zeros += self._some.count(lost & self._present)
        self._samples.append(self._moves(moved))
        self._known = None

    def summed(self, exact: Tensor, u: float) -> None:
        """Writes down how large the terms of sums are, from how far the exact tensor is moved if each operand is
        rounded: a relative error uniform in +- u has the variance u^2 / 3."""
        moved = self._moves(self._some.taken(exact.detach()).double() - self._exact)
        self._terms = float(moved.norm()) * math.sqrt(3) / u

    def put_terms(self, squares: float) -> None:
        """Writes down how large the terms of sums are, as the sum of their squares."""
        self._terms = math.sqrt(squares)

    @property
    def lost(self) -> bool:
        """Whether elements of a parameter's gradient were recorded as 0, and should not be 0."""
        return self._lost is not None

    def _moves(self, moved: Tensor) -> Tensor:
        """Notes how far roundings move some elements, and returns these distances, weighed."""
        moved.nan_to_num_(0.0, 0.0, 0.0)
        if self._lost is not None:
            lost, most = self._lost
            self._lost = lost, torch.maximum(most, moved.abs())
        return self._some.weighed(moved)

    def cancelled(self, u: float, number: float) -> float:
        """Returns the share of the elements that are 0 in the record because the terms of a sum cancel, or because each
        term is smaller than the smallest normal number of fp32. Many kernels make 0 of such a term.

        A rounding moves an element by about ``u / sqrt(3)`` times the size of its terms. The sum of the terms in fp32
        is off by 2^-24 of this size, times the root of their number. An element that is no larger may become any number
        of this size, and a sum of numbers with 24 digits is then often exactly 0. The bias of an attention's keys is an
        example: the softmax does not change if all scores move by one number.

        Args:
            u: the unit roundoff of the samples.
            number: the number of terms.
        """
        if self._lost is None:
            return 0.0
        some, (lost, most) = self._some, self._lost
        in_fp32 = math.sqrt(3 * number) * FP32 / u * most + number * SMALLEST
        return some.count(lost & (self._exact.abs() <= in_fp32)) / max(some.count(self._present), 1)

    @property
    def square(self) -> float:
        """The mean square of the errors that roundings make, from the samples so far."""
        return float(torch.stack(self._samples).square().sum()) / len(self._samples) if self._samples else 0.0

    def rounding(self) -> RoundingError:
        """Returns the error that roundings make, from the samples."""
        self._known = self._known or self._rounding()
        return replace(self._known, terms=self._terms)

    def _rounding(self) -> RoundingError:
        vectors, some, exact = self._samples, self._some, self._exact.double()
        if not vectors:
            return RoundingError(0.0, 1.0, 1, 0.0)
        stacked, square = torch.stack(vectors), self.square
        weighed = some.weighed(exact)
        norm = float(weighed.norm())
        along = float((stacked @ weighed).square().mean().sqrt()) / norm if norm else 0.0
        zeros = self._zeros / len(vectors) / max(some.count(self._present), 1)
        apart = contrasts(stacked)
        around = dimensions(apart, float(apart.square().sum()) / max(len(apart), 1))
        return RoundingError(
            math.sqrt(square), dimensions(stacked, square), len(vectors), along, zeros=zeros,
            common=float(stacked.mean(0).norm()), around=around,
        )  # fmt: skip


class Errors:
    """The errors of a record at all its places, and in its loss."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.places: dict[Point, Place] = {}
        self.loss_noise = 0.0
        self.whole: dict[str, Tensor] = {}  # the right numbers of buffers whose whole numbers are wrong
        self._outputs: dict[tuple[int, int], Tensor] = {}  # the outputs of the network, by call and place

    def compare(
        self, point: Point, seen: Tensor, exact: Tensor, dtype: torch.dtype, known: GradientError | None = None
    ) -> None:
        """Writes down how far a recorded tensor is from the exact one: see :class:`Place`."""
        exact, seen = exact.detach(), seen.detach()
        self.places[point] = Place(point, seen, exact, dtype, known)
        if point.whole and point.kind == "output":
            self._outputs[point.call, point.place] = seen.to(exact.dtype)
        elif point.whole:
            z = self._outputs[point.call, point.place]
            self.loss_noise += FP32 * float((z * exact).norm() + z.abs().max() / self.micro_batches)

    def sample(self, roundings: Roundings, point: Point, exact: Tensor | None = None) -> None:
        """Takes a sample of the roundings at a point that was compared: see :meth:`Place.sample`."""
        if point in self.places:
            self.places[point].sample(roundings, exact)

    def summed(self, point: Point, exact: Tensor, u: float) -> None:
        """Finds the size of the terms at a point that was compared: see :meth:`Place.summed`."""
        if point in self.places:
            self.places[point].summed(exact, u)

    def put_terms(self, point: Point, squares: float) -> None:
        """Is given the size of the terms at a point that was compared: see :meth:`Place.put_terms`."""
        if point in self.places:
            self.places[point].put_terms(squares)

    def lost(self, parameter: str) -> bool:
        """Returns whether elements of a parameter's gradient were recorded as 0, and should not be 0."""
        place = self.places.get(Point("parameter", parameter))
        return place is not None and place.lost

    def blind(self) -> bool:
        """Returns whether roundings are a large part of some gradient or output, but not all of it."""
        places = (place for place in self.places.values() if place.kind != "back")
        return any(BLIND * place.norm < math.sqrt(place.square) < place.norm for place in places)


def worst_calls(places: Mapping[Point, PlaceError]) -> dict[str, PlaceError]:
    """Returns by name the place of several calls that is the furthest off, in units of its limit."""
    calls: defaultdict[str, list[PlaceError]] = defaultdict(list)
    for point, place in places.items():
        calls[point.name].append(place)
    return {name: max(each, key=_share) if len(each) > 1 else each[0] for name, each in calls.items()}


def _share(place: PlaceError) -> float:
    """Returns about the share of its limit that an error is; inf for NaN. No limit is less than K times the roundings,
    so most errors need no quantile: scipy is slow to import."""
    if place.far <= K:
        return place.far / K
    most = max(largest_rounding(place.rounding, place), FP32 * max(place.norm, place.terms), 1e-300)
    share = (place.error - place.in_common) / (K * most)
    return math.inf if math.isnan(share) else share
