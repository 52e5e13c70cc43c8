"""Buffers after training, as the findings have them."""

import math
from types import SimpleNamespace

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
