"""Exponentials above fp16's largest number, and probabilities below its smallest."""

import math

import pytest
from support.pitfalls import line, results

LAST = math.log(math.exp(20) + 1)  # the loss of a logit 20 below the other one


def test_exponentials_overflow_unless_the_largest_logit_is_subtracted():
    fp16, bf16, fp32 = results("softmax", "exp(x) / sum")
    assert math.isnan(fp16)
    assert abs(bf16 - fp32) < 2.0**-8
    assert abs(fp32 - 1 / (1 + math.exp(-12))) < 1e-6
    assert math.exp(12) > 65504
    assert "is 162755 in fp32 and inf in fp16" in line("softmax", "exp(x) / sum").why
    assert results("softmax", "torch.softmax")[0] == 1.0


def test_a_long_row_overflows_where_its_sum_is_stored():
    assert results("softmax", "70,000") == (0.0, pytest.approx(1, abs=2.0**-8), pytest.approx(1, abs=1e-5))
    assert "sum to inf in fp16" in line("softmax", "70,000").why


def test_the_logarithm_of_a_small_probability_is_inf_unless_it_is_taken_of_the_logits():
    assert results("softmax", "-log(") == (math.inf, pytest.approx(LAST, abs=2.0**-4), pytest.approx(LAST, abs=1e-4))
    assert "2.06115e-09" in line("softmax", "-log(").why
    assert math.exp(-LAST) < 2.0**-25
    assert all(abs(value - LAST) < 1e-2 for value in results("softmax", "-log_softmax"))
