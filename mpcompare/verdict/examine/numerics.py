"""Measures of tensors: norms, distances, exponents, sketches. All sums are taken in float64, piece by piece."""

import math
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mpcompare.dtypes import HALF
from mpcompare.verdict.findings import HIGHEST, LOWEST

CHUNK = 1 << 16  # elements at a time: a few float64 copies of so many elements fit into the cache


def chunks(*tensors: Tensor, size: int = CHUNK) -> Iterator[tuple[Tensor, ...]]:
    """Yields the tensors side by side, piece by piece, each of ``size`` elements at most; nothing of empty tensors.

    Both parts of a complex number are elements. A single tensor comes row by row. Several come column by column if the
    first of them lies so in memory, as the weights of a backend that transposes them do. What is asked of single
    elements does not depend on their order.
    """
    if any(t.is_complex() for t in tensors):  # a wrong tensor may be real where the right one is complex
        tensors = tuple(numbers(t.to(torch.complex128)) for t in tensors)
    if len(tensors) > 1 and tensors[0].dim() == 2 and tensors[0].t().is_contiguous():
        tensors = tuple(t.t() for t in tensors)
    rows = [t.reshape(-1) for t in tensors]
    if len(rows[0]) > size:
        return zip(*(row.split(size) for row in rows), strict=True)
    return iter([tuple(rows)] if any(len(row) for row in rows) else [])


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by their bytes


def sum_of_bits(tensor: Tensor) -> int:
    """Returns the sum of the numbers of a dense tensor, each read as a whole number. Other numbers rarely have it, even
    where few of many are others."""
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return int(numbers.view(INTEGERS[numbers.itemsize]).sum())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have one dtype and one shape and are equal bit for bit, on any device."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_sparse(), b.to_sparse()
        return same_bits(a._indices(), b._indices()) and same_bits(a._values(), b._values())
    whole = INTEGERS[a.element_size()]
    return torch.equal(a.detach().view(whole), b.detach().to(a.device).view(whole))


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Returns the norm of ``a - b``, of all tensors as one vector, in float64. Equal numbers are 0 apart, and so are
    equal infinite numbers, such as a mask that is a buffer has, and two NaN."""

    def square(x: Tensor, y: Tensor) -> float:
        apart = x.double() - y.double()
        total = torch.dot(apart, apart).item()
        if math.isfinite(total):
            return total
        return apart.masked_fill_((x == y) | (x.isnan() & y.isnan()), 0).square_().sum().item()

    return math.sqrt(sum(square(x, y) for name in a for x, y in chunks(a[name], b[name])))


def finite_norm(tensors: Mapping[str, Tensor]) -> float:
    """Returns the norm of the finite numbers of all tensors as one vector, in float64."""

    def square(x: Tensor) -> float:
        total = torch.dot(x, x).item()
        return total if math.isfinite(total) else x.masked_fill(~x.isfinite(), 0).square_().sum().item()

    return math.sqrt(sum(square(x.double()) for t in tensors.values() for (x,) in chunks(t.detach())))


def dimensions(errors: Tensor, square: float) -> float:
    """Returns the number of dimensions in which errors vary, (tr C)^2 / tr C^2 with their covariance C.

    Args:
        errors: a sample in each row, float64. Two samples are independent, so the mean square of their product is
            tr C^2.
        square: the mean square of their norms, which is tr C.
    """
    pairs = max(math.comb(len(errors), 2), 1)  # a sample may take another path, as to another expert, and miss a layer
    products = torch.triu(errors @ errors.T, diagonal=1).square().sum().item() / pairs
    return max(square**2 / products, 1.0) if products else 1.0


def contrasts(samples: Tensor) -> Tensor:
    """Returns n - 1 rows of n samples that vary as the samples do, but around 0: each is the mean of some samples minus
    the next sample, over the root of what its variance is multiplied by (Helmert)."""
    number = torch.arange(1.0, len(samples), dtype=samples.dtype, device=samples.device).view(-1, 1)
    means = samples.cumsum(0)[:-1] / number
    return (means - samples[1:]) / (1 + 1 / number).sqrt()


def total_norm(grads: Mapping[str, Tensor], norm_type: float) -> float:
    """Returns the norm of all gradients as one vector, in float64: for a ``norm_type`` of 2 the root of the sum of
    squares, for inf the largest element, for any other p likewise."""
    # torch.linalg.vector_norm(g, dtype=torch.float64) takes seven times as long on a CPU
    norms = [torch.linalg.vector_norm(part.double(), norm_type) for g in grads.values() for (part,) in chunks(g)]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type).item() if norms else 0.0


def norm_of(grads: Mapping[str, Tensor]) -> float:
    """Returns the 2-norm of all gradients as one vector, in float64; NaN where there are none."""
    return total_norm(grads, 2.0) if grads else math.nan


# By dtype: whole numbers of as many bits, the place of the exponent among these bits, and the exponent of 1 there.
EXPONENTS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


def exponents(values: Tensor) -> Tensor:
    """Counts the values that are 0, and the values in ``[2^e, 2^(e+1))`` for e from LOWEST to HIGHEST, int64
    ``[1 + HIGHEST - LOWEST + 1]``. Smaller values count as LOWEST, and larger values as HIGHEST."""
    values = values.detach() if values.itemsize >= 4 else values.detach().float()
    whole, digits, bias = EXPONENTS[values.dtype]
    count = torch.zeros(HIGHEST - LOWEST + 2, dtype=torch.int64)
    found = torch.zeros(2 * bias + 2, dtype=torch.int64)
    for (part,) in chunks(values):
        found += torch.bincount(part.abs().view(whole) >> digits, minlength=len(found)).cpu()
        count[0] += part.numel() - part.count_nonzero().cpu()
    found[0] -= count[0]  # the smallest exponent is that of 0, too
    place = (torch.arange(len(found)) - bias).clamp_(LOWEST, HIGHEST).sub_(LOWEST - 1)
    return count.index_add_(0, place, found)


def numbers(tensor: Tensor) -> Tensor:
    """Returns the real numbers of a tensor: with the zeros of a sparse tensor, and both parts of complex numbers."""
    tensor = tensor.detach()
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


SPREAD = CHUNK
PART = 1 << 20  # elements that are seen of a gradient in a loop


def spread(tensor: Tensor, most: int | None = None) -> Tensor:
    """Returns a copy of at most ``most`` elements of a tensor (None: ``SPREAD``), in one row. The elements are the same
    in any layout."""
    return tensor.detach().flatten()[:: stride_of(tensor, most or SPREAD)].clone()


def in_part(tensor: Tensor) -> Tensor:
    """Returns a tensor, or at most ``PART`` elements of a large tensor, in one row."""
    return tensor if tensor.numel() <= PART else spread(tensor, PART)


def spreads(tensors: Mapping[str, Tensor], most: int | None = None) -> dict[str, Tensor]:
    """Returns :func:`spread` of each tensor."""
    return {name: spread(t, most) for name, t in tensors.items()}


def stride_of(tensor: Tensor, most: int) -> int:
    """Returns the distance from one to the next of at most so many elements. It shares no factor with any size, so that
    all columns have as many of them."""
    n = tensor.numel()
    distance = max(-(-n // most), 1)
    while math.gcd(distance, n) > 1:
        distance += 1
    return distance


def short_share(values: Tensor) -> float:
    """Returns the share of the numbers other than 0 that have no more digits than fp16 or bf16."""
    values = values[values != 0]
    exact = [values.to(dtype).to(values.dtype) == values for dtype in HALF]
    return max(float(same.double().mean()) for same in exact) if len(values) else 0.0


SKETCH = 256


def sketch(params: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Returns SKETCH numbers for each tensor, so that ``||sketch(a) - sketch(b)||`` is ``||a - b||`` within about 5 %.

    Each element is added with a random sign to one of the numbers, drawn at random. Sign and number are the same in
    every run (the count sketch of Charikar, Chen and Farach-Colton, ICALP 2002). So runs can be compared long after
    their weights are gone.
    """
    return {name: _sketch(name, p) for name, p in params.items()}


def sketch_of_change(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Returns :func:`sketch` of ``after - before``. One difference at a time is in memory."""
    return {name: _sketch(name, p - before[name].to(p.device)) for name, p in after.items()}


def _sketch(name: str, tensor: Tensor) -> list[float]:
    sums = torch.zeros(2 * SKETCH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    for (values,) in chunks(tensor.detach()):
        place = torch.randint(2 * SKETCH, values.shape, generator=generator)
        sums.index_add_(0, place, values.cpu().double())
    numbers: list[float] = (sums[:SKETCH] - sums[SKETCH:]).tolist()  # the upper half has the negative signs
    return numbers
