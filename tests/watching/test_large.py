"""Gradients of large tensors. A look keeps a part of them."""

from dataclasses import replace

import pytest
import torch
from support.marks import CUDA, diagonal
from support.watched_loops import Loop, spoil
from torch import nn
from torch.nn import functional as F

import mpcompare
from mpcompare.verdict.examine.numerics import PART

WIDE, WORDS = 17_000, 70_000


def two_large_tensors() -> nn.Module:
    """Returns a network with two large gradients. Backward fills all of one, and few rows of the other."""
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.Flatten(), nn.Linear(64, WIDE), nn.GELU(), nn.Linear(WIDE, 10))


def words():
    return torch.randint(WORDS, (32, 4)), torch.randint(10, (32,))


LOOP = Loop(make=two_large_tensors, batch=words, loss=lambda z, y: F.cross_entropy(z.float(), y), updates=1)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_right_loop_has_no_defect_and_its_norms_are_those_of_all_numbers(device):
    norms = []
    loop = replace(
        LOOP,
        device=device,
        clip=None,
        before_step=lambda net: norms.append(nn.utils.get_total_norm(_grads(net)).item()),
    )
    seen = loop.run(mpcompare.watch)
    assert seen.defects == []
    assert all(seen.sight.parameters.values())
    assert seen.facts["gradient_norms"] == pytest.approx(norms, rel=1e-3)
    parts = {name: g.part.shape for name, g in seen.look.used()[0].grads.items()}
    large = {name for name, p in seen.look.params.items() if p.numel() > PART}
    assert large == {"0.weight", "2.weight"}
    assert all(shape.numel() <= PART for shape in parts.values())
    assert all(parts[name].numel() > PART // 4 for name in large)


def _grads(net):
    return [p.grad for p in net.parameters()]


@diagonal(1, name=["0.weight", "2.weight"], wrong=[lambda g: 0.9 * g, lambda g: g.flip(0)])
def test_a_wrong_gradient_is_found(name, wrong):
    def spoilt():
        net = two_large_tensors()
        spoil(net.get_parameter(name), wrong)
        return net

    seen = replace(LOOP, make=spoilt).run(mpcompare.watch)
    assert seen.defects[0].place == name
