"""The warning of a step that takes long because a CPU has no instructions for 16-bit products."""

import pytest

from mpcompare.instruments import slow_products
from mpcompare.precision import BF16, FP16, FP32

MINUTE = 60 * slow_products.FLOPS  # the operations of a minute if a linear layer takes a second


@pytest.fixture
def slow(monkeypatch):
    """A CPU on which 16 bits take 100 times as long as fp32."""
    monkeypatch.setattr(slow_products, "seconds_of_products", lambda of: 0.01 if of == FP32 else 1.0)


@pytest.mark.parametrize("number_format", [BF16, FP16])
def test_a_step_of_a_minute_is_foretold(number_format, slow):
    line = slow_products.warning(number_format, lambda: MINUTE)
    assert f"multiplies {number_format.name} numbers 100 times slower than fp32 numbers" in line
    assert "a step may take 60 s" in line
    assert "task.batch_size" in line


def test_nothing_is_said_of_short_steps(slow):
    assert slow_products.warning(BF16, lambda: MINUTE // 10) == ""


def test_nothing_is_said_where_16_bits_are_fast(monkeypatch):
    monkeypatch.setattr(slow_products, "seconds_of_products", lambda of: 1.0 if of == FP32 else 0.5)
    assert slow_products.warning(BF16, lambda: pytest.fail("nobody asks for the operations")) == ""


@pytest.mark.parametrize("number_format", [FP32, BF16, FP16])
def test_products_take_time_in_any_format(number_format):
    assert 0 < slow_products.seconds_of_products(number_format) < 60
