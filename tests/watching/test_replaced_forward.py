"""Losses that put another forward in the place of a network's for a while, and call the network: MatryoshkaLoss of
sentence-transformers calls it once, and returns the first numbers of its embeddings for each further length."""

from contextlib import nullcontext

import pytest
import torch
from support.marks import slow_after
from torch import nn
from torch.nn import functional as F

import mpcompare


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, features):
        return {"embedding": self.net(features["x"])}


class Shortened:
    """Stands in the place of a forward."""

    def __init__(self, forward):
        self.forward, self.made, self.length = forward, [], None

    def use(self, length):
        self.length, self.place, self.is_first = length, 0, self.length is None

    def __call__(self, features):
        if self.is_first:
            self.made.append(self.forward(features)["embedding"])
        self.place += 1
        return {"embedding": F.normalize(self.made[self.place - 1][..., : self.length], dim=-1)}


def loss_of(model, batches, lengths=(16, 8, 4)):
    plain, total = model.forward, 0.0
    model.forward = shortened = Shortened(plain)
    for length in lengths:
        shortened.use(length)
        a, b = (model(each)["embedding"] for each in batches)
        total = total + F.cross_entropy(20 * a @ b.T, torch.arange(len(a)))
    model.forward = plain
    return total


def train(dtype, watch, plant=lambda model: None):
    torch.manual_seed(0)
    model = Encoder()
    kept = plant(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watch(model, optimizer) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
                loss = loss_of(model, [{"x": torch.randn(32, 20)}, {"x": torch.randn(32, 20)}])
            loss.backward()
            optimizer.step()
    del kept
    return seen, model


@pytest.mark.parametrize("dtype", slow_after(1, [torch.float32, torch.bfloat16]))
def test_the_modules_that_a_replaced_forward_calls_are_seen(dtype):
    seen, watched = train(dtype, mpcompare.watch)
    assert (seen.defects, seen.not_examined) == ([], [])
    assert set(seen.sight.parameters) == {f"net.{n}" for n, _ in watched.net.named_parameters()}
    _, plain = train(dtype, lambda *given: nullcontext())
    assert all(map(torch.equal, watched.parameters(), plain.parameters()))


@pytest.mark.slow
def test_a_wrong_gradient_below_a_replaced_forward_is_found():
    def halve(model):
        weight = model.net[2].weight
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        node.register_prehook(lambda grads: (grads[0] / 2,))
        return node  # else it is freed

    seen, _ = train(torch.bfloat16, mpcompare.watch, halve)
    assert [defect.place for defect in seen.defects] == ["net.2.weight"]
