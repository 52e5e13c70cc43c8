"""A sum of equal numbers stops where one of them is below half a gap. Stochastic rounding is right on average, and
Kahan's sum keeps what additions lose."""

import pytest
import torch
from support.pitfalls import line, results

from mpcompare.pitfalls.grid import gap, next_below, stored
from mpcompare.pitfalls.pitfall import number
from mpcompare.pitfalls.sums import UPDATES, added_stochastically, stochastically_rounded

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("dtype", "place", "stop"), [(torch.float16, 0, 256.0), (torch.bfloat16, 1, 32.0)])
def test_it_stops_where_the_addend_is_below_half_a_gap(dtype, place, stop):
    addend = float(stored(0.1, dtype))
    assert results("sums", "sum in the format")[place] == stop
    assert addend < gap(stop, dtype) / 2
    assert addend > gap(next_below(stop, dtype), dtype) / 2  # before, it went on
    assert f"{gap(stop, dtype) / 2:g} at {stop:g} in" in line("sums", "sum in the format").why


def test_it_goes_on_in_fp32():
    fp16, bf16, fp32 = results("sums", "sum in fp32")
    assert (fp16, bf16) == (1000.0, 1000.0)
    assert fp32 == results("sums", "sum in the format")[2]
    assert 0 < 1000 - fp32 < 0.1
    assert "0.1 in bf16 is 0.100098; fp32 sums that to 1000.98" in line("sums", "sum in fp32").why


def test_torch_sums_in_fp32_and_closer_than_one_by_one():
    for dtype in (torch.float16, torch.bfloat16):
        addends = torch.full((10_000,), 0.1, dtype=dtype)
        assert addends.sum() == addends.sum(dtype=torch.float32).to(dtype)
    fp16, bf16, fp32 = results("sums", "torch.sum")
    assert (fp16, bf16) == (1000.0, 1000.0)
    assert abs(fp32 - 1000) < 1e-3 < abs(results("sums", "sum in the format")[2] - 1000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_goes_to_one_of_its_neighbours_in_proportion(dtype, share, sign):
    between = sign * (1 + share * gap(1.0, dtype))
    rounded = stochastically_rounded(
        torch.full((10_000,), between, dtype=torch.float64), dtype, torch.Generator().manual_seed(1)
    )
    away = (rounded.double() == sign * (1 + gap(1.0, dtype))).double().mean()
    assert set(rounded.abs().tolist()) == {1.0, 1 + gap(1.0, dtype)}
    assert abs(away - share) < 0.025  # five standard deviations


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_of_the_format_stays(dtype):
    values = torch.tensor([0.0, 1.0, -1.0, 2.0**-14, 1.5, -300.0], dtype=torch.float64)
    assert stochastically_rounded(values, dtype, torch.Generator().manual_seed(0)).tolist() == values.tolist()


def test_stochastic_rounding_reaches_the_sum_on_average():
    assert results("stochastic_rounding", "to nearest")[:2] == (1.0, 1.0)
    for place, dtype in enumerate((torch.float16, torch.bfloat16)):
        weights = added_stochastically(*UPDATES, dtype).double()
        exact = 1 + 1000 * float(stored(1e-4, dtype))
        assert abs(float(weights.mean()) - exact) < 5 * float(weights.std()) / len(weights) ** 0.5
        assert results("stochastic_rounding", "1e-4: mean")[place] == float(weights.mean())
        assert number(float(weights.std())) in line("stochastic_rounding", "1e-4: mean").why
        total = results("stochastic_rounding", "0.1: mean")[place]
        assert abs(total / (10_000 * float(stored(0.1, dtype))) - 1) < 0.005
    assert abs(results("stochastic_rounding", "1e-4: mean")[2] - 1.1) < 1e-5


def test_kahans_sum_is_within_a_gap():
    for asked, exact in (("1e-4, with", lambda x: 1 + 1000 * x(1e-4)), ("0.1, with", lambda x: 10_000 * x(0.1))):
        for dtype, result in zip(DTYPES, results("kahan", asked), strict=True):
            assert abs(result - exact(lambda value, dtype=dtype: float(stored(value, dtype)))) <= gap(result, dtype)
    assert results("kahan", "to nearest")[:2] == (1.0, 1.0)
    assert "1000.98" in line("kahan", "0.1, with").why
    assert "within a gap of it, 4" in line("kahan", "0.1, with").why
