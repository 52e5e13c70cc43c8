"""The errors at the places of a step, and the size of roundings there."""

import math

import pytest
import torch

from mpcompare.precision import PRECISIONS
from mpcompare.verdict.examine.forced.arithmetic import Point
from mpcompare.verdict.examine.forced.places import FEW, Errors, Some, worst_calls
from mpcompare.verdict.examine.forced.roundings import Roundings
from mpcompare.verdict.judge.errors import PlaceError
from mpcompare.verdict.judge.limits import largest_rounding, ratio_quantile

SHAPE = 256, 256  # more elements than are looked at to find the size of roundings


def one(at):
    """Only one element is not 0, as in the gradients of a trained network that is sure of all samples but one."""
    tensor = torch.zeros(SHAPE, dtype=torch.float64)
    tensor[at] = 0.3
    return tensor


TENSORS = {
    "alike": torch.randn(SHAPE, dtype=torch.float64, generator=torch.manual_seed(0)),
    "heavy tails": torch.randn(SHAPE, dtype=torch.float64, generator=torch.manual_seed(1)) ** 9,
    "one, first": one((0, 0)),
    "one, in between": one((77, 101)),
    "transposed": torch.randn(SHAPE, dtype=torch.float64, generator=torch.manual_seed(2)).mT,
    "few": torch.full((7,), 0.3, dtype=torch.float64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_some_elements_tell_the_norm_of_a_tensor(name):
    tensor = TENSORS[name]
    some = Some.of(tensor, FEW)
    taken = some.taken(tensor)
    assert len(taken) <= FEW
    assert float(some.weighed(taken).norm()) == pytest.approx(float(tensor.norm()), rel=0.05)
    assert some.count(taken != 0) == pytest.approx(int(tensor.count_nonzero()), rel=0.05)


@pytest.mark.parametrize("name", TENSORS)
def test_roundings_are_as_large_as_those_of_the_whole_tensor(name):
    exact, point = TENSORS[name], Point("gradient", "layer")
    errors, roundings = Errors(1), Roundings(PRECISIONS["fp16"])
    errors.compare(point, exact.half(), exact, torch.float16)
    for roundings.sample in range(32):
        errors.sample(roundings, point, exact.float())
    place = errors.places[point]
    assert 0 < place.error <= 2.0**-11 * place.norm
    # An error is uniform within half a last digit: u / sqrt(3) just above a power of two, and half of that just below.
    assert place.rounding().error == pytest.approx(2.0**-11 / 3**0.5 * place.norm, rel=0.5)


def test_a_gradient_that_overflows_where_nobody_needs_it_is_no_error():
    exact = torch.full((8,), 2.0, dtype=torch.float64)
    seen = exact.clone()
    seen[3] = torch.inf  # a sum may overflow though its parts cancel in the exact sum
    errors = Errors(1)
    errors.compare(point := Point("gradient", "layer"), seen, exact, torch.float16)
    assert errors.places[point].error == 0
    errors.compare(output := Point("output", "layer"), seen, exact, torch.float16)
    assert errors.places[output].error == torch.inf


def test_infinities_of_a_mask_are_equal():
    exact = torch.tensor([1.0, -torch.inf, 2.0], dtype=torch.float64)
    errors, point = Errors(1), Point("output", "layer")
    errors.compare(point, exact + torch.tensor([0.5, 0.0, 0.0]), exact, torch.float16)
    assert (errors.places[point].error, errors.places[point].norm) == (0.5, 5**0.5)
    assert exact[1] == -torch.inf  # the network goes on with this number


@pytest.mark.parametrize(("dtype", "share"), [(torch.float16, 0.75), (torch.float32, 0.0)])
def test_zeros_of_exact_numbers_too_small_for_fp16_are_foreseen(dtype, share):
    """The numbers are too small for fp16, but the roundings of their terms, which cancel, are not."""
    exact = torch.tensor([1.0, 1e-29, 2e-29, -1e-29], dtype=torch.float64)
    errors, point, roundings = Errors(1), Point("parameter", "weight"), Roundings(PRECISIONS["fp16"])
    errors.compare(point, exact, exact, dtype)
    for roundings.sample in range(4):
        errors.sample(roundings, point, exact.float() + 1e-3)
    assert errors.places[point].rounding().zeros == share


def lost(terms, precision, zeros):
    """Returns the share of the zeros of a gradient that cancelling terms explain. Each element is the sum of a column,
    and all elements are ``zeros``."""
    errors, point = Errors(1), Point("parameter", "0.bias")
    exact = terms.sum(0)
    errors.compare(point, torch.where(zeros, 0.0, exact.float()), exact, torch.float32)
    roundings = Roundings(PRECISIONS[precision])
    roundings.backward = True
    for roundings.sample in range(4):
        errors.sample(roundings, point, roundings.round_(terms.clone()).sum(0))
    return errors.places[point].cancelled(roundings.u, len(terms))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_sum_whose_terms_cancel_may_be_0(precision):
    others = torch.randn(256, 48, generator=torch.manual_seed(0)).double()
    rest = 2.0**-24 * torch.randn(1, 48, generator=torch.manual_seed(1)).double()
    cancelling = torch.cat([others, rest - others.sum(0, keepdim=True)])
    others = torch.cat([others, rest])
    assert lost(cancelling, precision, torch.ones(48, dtype=torch.bool)) == 1
    both = torch.cat([cancelling[:, :16], others[:, 16:]], 1)
    assert lost(both, precision, torch.ones(48, dtype=torch.bool)) == pytest.approx(1 / 3)
    assert lost(both, precision, torch.arange(48) >= 16) == 0


@pytest.mark.parametrize("size", [1e-8, 1e-9, 1e-11])
def test_no_gradient_that_is_too_small_for_fp16_cancels(size):
    """A rounding to fp16 makes 0 of each of these terms: that is underflow."""
    terms = size * torch.randn(256, 48, generator=torch.manual_seed(0)).double()
    assert lost(terms, "fp16", torch.ones(48, dtype=torch.bool)) == 0


@pytest.mark.parametrize(("size", "share"), [(1e-39, 1), (1e-30, 0)])
def test_terms_below_the_normal_numbers_of_fp32_may_be_0(size, share):
    """Kernels make 0 of subnormal numbers. The gradients of a network that is sure of itself are so small."""
    terms = size * torch.rand(16, 48, generator=torch.manual_seed(0)).double()
    assert lost(terms, "bf16", torch.ones(48, dtype=torch.bool)) == share


@pytest.mark.parametrize("shared", [0.0, 1.0])
def test_an_error_that_all_samples_share_needs_no_quantile(shared):
    exact, point = torch.ones(64, dtype=torch.float64), Point("gradient", "layer")
    errors, roundings = Errors(1), Roundings(PRECISIONS["fp32"])
    errors.compare(point, exact, exact, torch.float32)
    drawn = torch.Generator().manual_seed(0)
    for _ in range(4):
        moved = 0.01 * torch.randn(64, dtype=torch.float64, generator=drawn) + shared
        errors.sample(roundings, point, exact + moved)
    made = errors.places[point].rounding()
    assert made.common == pytest.approx(8 * shared, abs=0.1)
    once = ratio_quantile(made.dimensions, 4 * made.dimensions) * made.error
    assert largest_rounding(made.error, made) <= once
    assert (largest_rounding(made.error, made) < 1.1 * made.error) == bool(shared)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (PlaceError(math.nan, 1.0, 1e-3, 100, 4), PlaceError(1e-3, 1.0, 1e-3, 100, 4)),
        # These roundings vary in so many dimensions that none is much larger than another.
        (PlaceError(4e-3, 1.0, 1e-3, 4096, 4), PlaceError(8e-3, 1.0, 1e-3, 1, 4)),
    ],
    ids=["NaN", "narrow limit"],
)
def test_of_several_calls_the_one_counts_that_is_the_furthest_beyond_its_limit(wrong, right, backwards):
    calls = {Point("output", "layer", number): place for number, place in enumerate((wrong, right))}
    assert worst_calls(dict(reversed(calls.items())) if backwards else calls) == {"output layer": wrong}
