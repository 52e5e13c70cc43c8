"""Positions that share a number of bf16."""

import math

import torch
from support.pitfalls import line, results

from mpcompare.pitfalls.positions import first_missing


def test_the_first_missing_position_is_found_by_looking_at_all():
    for dtype in (torch.float16, torch.bfloat16):
        integers = torch.arange(4096)
        missing = integers[integers.to(dtype).long() != integers]
        assert first_missing(dtype) == missing[0]
    assert results("positions", "first position") == (2049, 257, 2**24 + 1)
    assert "fp16 has 11, bf16 has 8, fp32 has 24" in line("positions", "first position").why


def test_positions_share_numbers():
    fp16, bf16, fp32 = results("positions", "different values")
    # All up to 2^11 or 2^8, then half as many of each next power of two; the last one is rounded up to 4096.
    assert (fp16, bf16, fp32) == (2048 + 1024 + 1, 256 + 4 * 128 + 1, 4096)
    assert "numbers are 16 apart" in line("positions", "different values").why


def test_an_angle_of_a_rounded_position_is_another_one():
    assert results("positions", "1,001 is stored") == (1001, 1000, 1001)
    assert "neighbours there are 4 apart" in line("positions", "1,001 is stored").why
    fp16, bf16, fp32 = results("positions", "cos(1,001)")
    assert abs(fp32 - math.cos(1001)) < 1e-6
    assert abs(fp16 - math.cos(1001)) < 2.0**-11
    assert abs(bf16 - math.cos(1000)) < 2.0**-8
    assert "cosine of 1000; exact is -0.39194" in line("positions", "cos(1,001)").why
