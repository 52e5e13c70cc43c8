"""Squares that leave fp16 although their root fits."""

import math

import pytest
from support.pitfalls import line, results


def test_a_mean_of_squares_leaves_fp16_at_both_ends():
    assert results("mean_of_squares", "the mean of squares of 300") == (math.inf, 90112.0, 90000.0)
    assert "A square of 90000 is above 65504" in line("mean_of_squares", "the mean of squares of 300").why
    fp16, bf16, fp32 = results("mean_of_squares", "the mean of squares of 0.0001")
    assert fp16 == 0.0
    assert abs(bf16 - fp32) / fp32 < 2.0**-7
    assert "1e-08 is below half of 5.96046e-08" in line("mean_of_squares", "the mean of squares of 0.0001").why
    assert 1e-8 < 2.0**-25


def test_its_root_in_fp32_fits():
    assert results("mean_of_squares", "in fp32, of 300") == (300.0,) * 3
    assert all(abs(value / 1e-4 - 1) < 2.0**-8 for value in results("mean_of_squares", "in fp32, of 0.0001"))


def test_a_norm_of_inf_takes_the_gradient_away():
    assert results("norm", "sqrt(sum") == (math.inf, 300.0, 300.0)
    assert "sum of squares is 90000, above 65504" in line("norm", "sqrt(sum").why
    assert results("norm", "clipped") == (0.0, pytest.approx(1 / 3, abs=2.0**-9), pytest.approx(1 / 3, abs=1e-7))
    assert "A norm of inf makes the factor 0" in line("norm", "clipped").why
    assert results("norm", "vector_norm") == (300.0,) * 3


def test_layer_norm_by_hand_becomes_0_and_nan_and_torchs_does_not():
    assert results("layer_norm", "by hand, of (300") == (0.0, pytest.approx(1, abs=2.0**-7), pytest.approx(1, abs=1e-6))
    assert "variance in fp16 is inf" in line("layer_norm", "by hand, of (300").why
    assert results("layer_norm", "torch's") == (1.0,) * 3
    assert results("layer_norm", "eps = 1e-8") == (pytest.approx(math.nan, nan_ok=True), 0.0, 0.0)
    assert "This eps is 0 in fp16, so that 0 is divided by 0" in line("layer_norm", "eps = 1e-8").why
