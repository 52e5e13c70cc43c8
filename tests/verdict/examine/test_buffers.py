"""Buffers after training, as the findings have them."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpcompare.verdict.examine.buffers import buffers_of_backend


def found(initial, after):
    """Returns the buffer as the findings have it; None where it has not moved."""
    network = nn.Module()
    network.register_buffer("b", initial)
    return buffers_of_backend(network, SimpleNamespace(buffers=lambda: {"b": after})).get("b")


def test_a_complex_buffer_moves_by_its_imaginary_part():
    first = torch.tensor([1 + 1j, 2 + 0j, 0j])
    assert found(first, first.clone()) is None
    b = found(first, first.conj())
    assert (b.whole, b.dtype, b.should_dtype, b.elements) == ("", "complex64", "complex64", 3)
    assert math.hypot(*b.sketch) > 0
    assert b.sketch != found(first, 2 * first).sketch
    assert found(first, first.real).dtype == "fp32"


def test_nan_and_inf_that_a_network_has_from_the_start_are_no_fault():
    assert found(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0])) is None
    history = torch.full((4,), -math.inf)
    filled = torch.tensor([0.3, -math.inf, 0.7, math.nan])
    b = found(history, filled)
    assert (math.hypot(*b.sketch), b.elements) == (pytest.approx(math.hypot(0.3, 0.7)), 2)
    grown = found(torch.empty(0), torch.full((3, 3), -math.inf).triu(1))  # a mask that the first call makes
    assert (math.hypot(*grown.sketch), grown.elements) == (0, 0)


def test_nan_in_the_place_of_a_number_counts():
    for wrong in (math.nan, math.inf):
        b = found(torch.tensor([0.0, math.inf]), torch.tensor([wrong, 2.0]))
        assert not all(map(math.isfinite, b.sketch))
