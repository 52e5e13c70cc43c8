"""The ends of fp16, the gap next to 1, and positions that share a number of bf16."""

import math

import torch
from support.pitfalls import line, results

from mpcompare.pitfalls.grid import gap
from mpcompare.pitfalls.pitfall import number
from mpcompare.pitfalls.range import first_missing


def test_below_half_of_the_smallest_number_is_0_in_fp16_only():
    assert results("underflow", "2^-24 is stored as") == (2.0**-24,) * 3
    assert results("underflow", "2^-25") == (0.0, 2.0**-25, 2.0**-25)
    assert results("underflow", "gradient of 1e-8")[0] == 0.0
    assert all(abs(value / 1e-8 - 1) < 2e-3 for value in results("underflow", "gradient of 1e-8")[1:])


def test_subnormal_numbers_have_few_digits():
    fp16, bf16, fp32 = results("underflow", "1.4 * 2^-24")
    assert fp16 == 2.0**-24
    assert abs(bf16 - fp32) / fp32 < 2.0**-8
    assert f"{100 * (1 - 1 / 1.4):.0f} %" in line("underflow", "1.4 * 2^-24").why


def test_the_loss_scale_keeps_a_gradient_that_fp16_has_not():
    assert abs(results("underflow", "1e-8 * 65536")[0] / 1e-8 - 1) < 2.0**-11
    assert number(2.0**-14) in line("underflow", "1e-8 * 65536").why


def test_fp16_ends_halfway_to_the_next_power_of_two():
    assert results("overflow", "+ 15") == (65504.0, 65536.0, 65519.0)
    assert results("overflow", "+ 16") == (math.inf, 65536.0, 65520.0)
    assert "65504 is fp16's largest number, 32 above" in line("overflow", "+ 15").why
    assert "From 65520 on fp16 rounds to inf" in line("overflow", "+ 16").why
    assert torch.tensor([65519.99, 65520.0]).half().tolist() == [65504.0, math.inf]


def test_a_sum_overflows_where_it_is_stored():
    fp16, bf16, fp32 = results("overflow", "sum")
    assert (fp16, fp32) == (math.inf, 100_000.0)
    assert abs(bf16 - fp32) <= gap(bf16, torch.bfloat16) / 2
    assert "in fp32 to 100000, and storing that in fp16 gives inf" in line("overflow", "sum").why


def test_an_update_below_half_a_gap_is_lost_and_reaches_the_master():
    assert results("lost_update", "1 + 1e-4")[:2] == (1.0, 1.0)
    assert gap(1.0, torch.bfloat16) / 2 > gap(1.0, torch.float16) / 2 > 1e-4 > gap(1.0, torch.float32) / 2
    assert all(number(gap(1.0, d) / 2) in line("lost_update", "1 + 1e-4").why for d in (torch.float16, torch.bfloat16))
    assert results("lost_update", "1 + 1e-3")[:2] == (1 + 2.0**-10, 1.0)
    fp16, bf16, fp32 = results("lost_update", "after 1,000 updates")
    assert (fp16, bf16) == (1.0, 1.0)
    assert abs(fp32 - 1.1) < 1e-4
    fp16, bf16, fp32 = results("lost_update", "master")
    assert abs(fp16 - fp32) <= 2.0**-11
    assert abs(bf16 - fp32) <= 2.0**-8
    assert number(fp32) in line("lost_update", "master").why


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
