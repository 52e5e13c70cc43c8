"""Numbers that stand for tensors: exponents, sketches, bits."""

import math

import numpy as np
import pytest
import torch

from mpcompare.tasks.optimizers import Sgd
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.errors import gradient_errors, update_errors
from mpcompare.verdict.examine.seen import Seen
from mpcompare.verdict.findings import HIGHEST, LOWEST


def test_exponents_count_powers_of_two_and_zeros():
    values = torch.tensor([0.0, 0.0, 1.0, 1.99, -2.0, 2.0**-24, 2.0**-200, 2.0**200], dtype=torch.float64)
    counts = numerics.exponents(values)
    assert counts.sum() == len(values)
    assert counts[0] == 2

    def at(exponent):
        return int(counts[1 + exponent - LOWEST])

    assert (at(0), at(1), at(-24)) == (2, 1, 1)
    assert at(LOWEST) == at(HIGHEST) == 1  # values beyond the range count to its ends


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exponents_in_each_format(dtype):
    values = torch.tensor([0.0, -3.0, 0.75, torch.finfo(dtype).smallest_normal / 4, math.inf], dtype=dtype)
    counts = {place + LOWEST - 1: count for place, count in enumerate(numerics.exponents(values).tolist()) if count}
    assert counts == {LOWEST - 1: 1, 1: 1, -1: 1, LOWEST: 1, HIGHEST: 1}


def test_exponents_of_many_values_are_those_of_all():
    torch.manual_seed(0)
    values = torch.randn(2 * numerics.CHUNK + 5) * 2.0 ** torch.randint(-40, 40, (2 * numerics.CHUNK + 5,))
    exponent = values.double().abs().log2().floor().clamp(LOWEST, HIGHEST).long() - LOWEST + 1
    assert numerics.exponents(values).tolist() == torch.bincount(exponent, minlength=HIGHEST - LOWEST + 2).tolist()


def test_how_a_tensor_lies_in_memory_does_not_matter():
    torch.manual_seed(0)
    before, after, g, exact = torch.randn(4, 700, 600).unbind()  # more than a chunk
    after[3, 5] = before[3, 5]

    def by_columns(t):
        return t.t().contiguous().t()

    def numbers(lie):
        replay, found = Sgd(0.1, 0.9).replay(), []
        for _ in range(2):
            tensors = ({"w": lie(t)} for t in (before, after, g))
            found.append(update_errors(replay, Seen(*tensors, 0.1), torch.bfloat16)["w"])
        found.append(gradient_errors({"w": lie(g)}, {"w": exact.double()})["w"])
        values = [value for each in found for value in vars(each).values() if value is not None]
        return [*values, numerics.distance({0: lie(g)}, {0: exact})]

    assert numbers(by_columns) == pytest.approx(numbers(lambda t: t), rel=1e-12)
    assert numerics.sketch({"w": by_columns(g)}) == numerics.sketch({"w": g})
    assert numerics.same_bits(by_columns(g), g)
    assert not numerics.same_bits(by_columns(before), after)
    assert not numerics.same_bits(g, g.double())
    assert not numerics.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert numerics.same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))


def test_sketches_tell_how_far_apart_weights_are():
    torch.manual_seed(0)
    ratios = []
    for name in ("W1", "W2", "W3", "W4"):
        a, b = torch.randn(300, 200), torch.randn(300, 200)
        b = a + 1e-4 * b
        distance = np.subtract(numerics.sketch({name: a})[name], numerics.sketch({name: b})[name])
        ratios.append(np.linalg.norm(distance) / (a - b).norm().item())
    assert all(abs(r - 1) < 4 / math.sqrt(2 * numerics.SKETCH) for r in ratios)  # 4 standard deviations
    assert numerics.sketch({"b1": torch.zeros(10)})["b1"] == [0.0] * numerics.SKETCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_one_number_of_many_moves_the_sum_of_bits(dtype):
    values = torch.randn(100, 300, dtype=dtype).t()
    before = numerics.sum_of_bits(values)
    assert numerics.sum_of_bits(values.clone()) == before
    values[7, 11] *= 1 + 2.0**-7
    assert numerics.sum_of_bits(values) != before


def test_empty_tensors_are_0():
    empty = {"w": torch.empty(0, 3)}
    assert numerics.total_norm(empty, math.inf) == numerics.total_norm(empty, 2.0) == 0
    assert numerics.total_norm({**empty, "b": torch.tensor([3.0, -4.0])}, math.inf) == 4
    assert numerics.distance(empty, empty) == numerics.finite_norm(empty) == 0
    e = gradient_errors(empty, empty)["w"]
    assert (e.error, e.norm, e.largest, e.elements) == (0, 0, 0, 0)
    update = update_errors(Sgd(0.1).replay(), Seen(empty, empty, empty, 0.1), torch.bfloat16)["w"]
    assert (update.excess, update.lost) == (0, 0)


def test_both_parts_of_complex_numbers_count():
    right = {"f": torch.tensor([[1 + 2j, 3 - 4j], [0.5j, 2]])}
    conjugate, real = ({"f": right["f"].conj()}, {"f": right["f"].real})
    assert numerics.distance(right, right) == 0
    assert numerics.distance(right, conjugate) == pytest.approx(math.sqrt(16 + 64 + 1))
    assert numerics.distance(right, real) == numerics.distance(real, right) == pytest.approx(math.sqrt(20.25))
    assert numerics.total_norm(right, 2.0) == numerics.finite_norm(right) == pytest.approx(math.sqrt(34.25))
    e = gradient_errors(conjugate, right)["f"]
    assert (e.error, e.largest, e.elements) == (pytest.approx(9), 4, 6)
    assert e.transposed == pytest.approx(numerics.distance(right, {"f": right["f"].mH}))


def test_what_is_not_finite_in_both_is_equal():
    mask = {"m": torch.tensor([math.nan, math.inf, -math.inf, 1.0])}
    assert numerics.distance(mask, mask) == 0
    assert numerics.distance(mask, {"m": torch.tensor([math.nan, math.inf, -math.inf, 3.0])}) == 2
    assert math.isnan(numerics.distance(mask, {"m": torch.tensor([0.0, math.inf, -math.inf, 1.0])}))
    assert numerics.distance(mask, {"m": torch.tensor([math.nan, math.inf, math.inf, 1.0])}) == math.inf
