import math

import numpy as np
import pytest
import torch

from mpcompare.tasks.optimizers import Sgd
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.reading import HIGHEST, LOWEST


def test_gradient_errors_are_measured_beside_the_exact_ones():
    exact = {"W1": torch.tensor([[3.0, 0.0], [4.0, 0.0]]).double(), "b1": torch.tensor([1.0, 2.0]).double()}
    grads = {"W1": torch.tensor([[3.0, 4.0], [0.0, 0.0]])}  # the transpose
    found = numerics.gradient_errors(grads, exact)
    W1 = found["W1"]
    assert (W1["norm"], W1["largest"], W1["elements"]) == (5.0, 4.0, 2)
    assert W1["error"] == pytest.approx(math.sqrt(32))
    assert W1["transposed"] == 0
    assert W1["zeros"] == 0.5  # of the two that are not 0, the 4
    assert found["b1"] == {}  # missing

    scaled = numerics.gradient_errors({"b1": torch.tensor([0.25, 0.5])}, {"b1": exact["b1"]})["b1"]
    assert scaled["slope"] == pytest.approx(0.25)
    assert scaled["residual"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fp32_updates_are_within_their_roundings_and_16_bit_ones_are_not(momentum):
    torch.manual_seed(0)
    module = torch.nn.Parameter(torch.randn(100, 30))
    optimizer = torch.optim.SGD([module], lr=1e-3, momentum=momentum)
    fp32, short = Sgd(1e-3, momentum).replay(), Sgd(1e-3, momentum).replay()
    for _ in range(4):
        before, g = module.detach().clone(), torch.randn(100, 30)
        module.grad = g.clone()
        optimizer.step()
        e = numerics.update_errors(fp32, {"w": before}, {"w": module.detach()}, {"w": g}, 1e-3, torch.bfloat16)["w"]
        assert 0.5 < e["excess"] <= 1  # the bound is met, and hardly larger than it must be
        assert e["slope"] == pytest.approx(1, abs=1e-4)
        assert e["lost"] == e["lost_in_fp32"] == 0
        assert e["short"] < 0.01
        rounded = module.detach().bfloat16().float()
        low = {"w": before.bfloat16().float()}
        e = numerics.update_errors(short, low, {"w": rounded}, {"w": g}, 1e-3, torch.bfloat16)["w"]
        assert e["excess"] > 1000
        assert e["lost"] > 0.3
        assert e["short"] == 1


def test_updates_that_fp32_itself_loses_are_told_apart():
    before, g = {"b1": torch.tensor([1.0, 1.0])}, {"b1": torch.tensor([1e-9, 1.0])}
    after = {"b1": torch.tensor([1.0, 0.0])}
    e = numerics.update_errors(Sgd(1.0).replay(), before, after, g, 1.0, torch.float16)["b1"]
    assert e["lost"] == e["lost_in_fp32"] == 0.5
    assert e["excess"] <= 1


def test_exponents_count_powers_of_two_and_zeros():
    values = torch.tensor([0.0, 0.0, 1.0, 1.99, -2.0, 2.0**-24, 2.0**-200, 2.0**200], dtype=torch.float64)
    counts = numerics.exponents(values)
    assert counts.sum() == len(values)
    assert counts[0] == 2

    def at(exponent):
        return int(counts[1 + exponent - LOWEST])

    assert (at(0), at(1), at(-24)) == (2, 1, 1)
    assert at(LOWEST) == at(HIGHEST) == 1  # what lies beyond counts to the ends


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
            found.append(numerics.update_errors(replay, *tensors, 0.1, torch.bfloat16)["w"])
        errors = numerics.gradient_errors({"w": lie(g)}, {"w": exact.double()})["w"]
        return [*found[0].values(), *found[1].values(), *errors.values(), numerics.distance({0: lie(g)}, {0: exact})]

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
