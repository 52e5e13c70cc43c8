"""A sum of equal numbers stops where one of them is below half a gap."""

import pytest
import torch
from support.pitfalls import line, results

from mpcompare.pitfalls.grid import gap, next_below, stored


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
