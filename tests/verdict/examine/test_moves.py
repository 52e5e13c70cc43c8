"""The digest of training steps."""

from unittest import mock

import pytest
import torch

from mpcompare.verdict.examine import moves
from mpcompare.verdict.examine.moves import Digest


class Weights:
    """Weights without a backend. The second tensor lies column by column."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.w = torch.randn(60, 50, generator=generator)
        self.v = torch.randn(7, 5, generator=generator).t()

    def master_params(self):
        return {"w": self.w, "v": self.v}


def test_norms_are_those_of_the_change_of_each_tensor():
    backend = Weights()
    digest = Digest(backend, torch.bfloat16)
    backend.w += 0.5
    digest.take()
    backend.v[2, 3] -= 2.0
    digest.take()
    found = digest.moves()
    assert found.tensors["w"] == [pytest.approx(0.5 * 3000**0.5, rel=1e-4), 0.0]
    assert found.tensors["v"] == [0.0, pytest.approx(2.0, rel=1e-4)]
    assert found.steps == [pytest.approx(0.5 * 3000**0.5, rel=1e-4), pytest.approx(2.0, rel=1e-4)]
    assert found.weights["w"] == pytest.approx(float(backend.w.norm()), rel=1e-4)
    assert max(found.short) <= 3


def test_some_elements_of_a_large_tensor_are_looked_at_and_the_same_ones_in_every_layout():
    backend, other = Weights(), Weights()
    other.w = other.w.t().contiguous().t()
    with mock.patch.object(moves, "ELEMENTS", 100):
        digests = [Digest(each, torch.bfloat16) for each in (backend, other)]
        for each, digest in zip((backend, other), digests, strict=True):
            each.w *= torch.linspace(1, 2, 50)
            digest.take()
        first, second = (digest.moves() for digest in digests)
    assert first == second
    assert first.weights["w"] < 0.5 * float(backend.w.norm())


def test_weights_of_16_bits_are_counted_but_for_zeros():
    backend = Weights()
    digest = Digest(backend, torch.bfloat16)
    backend.w.copy_(backend.w.bfloat16())
    backend.w[:, 0] = 0.0
    backend.v[0, 0] = float("inf")
    digest.take()
    assert 0 <= digest.moves().short[0] - 60 * 49 <= 1


def test_a_long_training_keeps_the_tensors_of_its_first_steps():
    backend = Weights()
    with mock.patch.object(moves, "NUMBERS", 6):
        digest = Digest(backend, torch.bfloat16)
        for _ in range(5):
            backend.w += 1.0
            digest.take()
        found = digest.moves()
    assert len(found.steps) == len(found.short) == 5
    assert {name: len(norms) for name, norms in found.tensors.items()} == {"w": 3, "v": 3}
