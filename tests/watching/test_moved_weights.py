"""Loops that move the weights between two calls whose gradients they add: attacks on the embeddings (FGM) and on all
weights (AWP). Each call is replayed with the weights that it had."""

from contextlib import nullcontext

import pytest
import torch
from support.marks import diagonal
from torch import nn
from torch.nn import functional as F

import mpcompare


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.norm(self.embedding(x).mean(1)))


class Attack:
    """The class that goes round on Kaggle: it adds to the weights, and puts others in their place to restore them."""

    def __init__(self, model, name):
        self.params = [p for n, p in model.named_parameters() if name in n]

    def attack(self):
        self.backup = [p.data.clone() for p in self.params]
        for p in self.params:
            p.data.add_(p.grad / p.grad.norm())

    def restore(self):
        for p, before in zip(self.params, self.backup, strict=True):
            p.data = before


class Training:
    def __init__(self, name, dtype):
        torch.manual_seed(0)
        self.model, self.dtype = Classifier(), dtype
        self.optimizer, self.attack = torch.optim.AdamW(self.model.parameters(), 1e-3), Attack(self.model, name)

    def cast(self):
        return torch.autocast("cpu", dtype=self.dtype) if self.dtype is not torch.float32 else nullcontext()

    def backward(self, x, y):
        with self.cast():
            loss = F.cross_entropy(self.model(x), y)
        loss.backward()

    def train(self, around=nullcontext):
        torch.manual_seed(1)
        for _ in range(2):
            x, y = torch.randint(50, (32, 6)), torch.randint(4, (32,))
            with around():
                self.backward(x, y)
                self.attack.attack()
                self.backward(x, y)
                self.attack.restore()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def watched(self, **how):
        with mpcompare.watch(self.model, self.optimizer) as seen:
            self.train(**how)
        return seen


@pytest.mark.slow
@diagonal(dtype=[torch.float32, torch.bfloat16], name=["embedding", ""])
def test_each_call_has_the_weights_that_it_had(name, dtype):
    watched, plain = Training(name, dtype), Training(name, dtype)
    seen = watched.watched()
    plain.train()
    assert (seen.defects, seen.not_examined) == ([], [])
    assert len(seen.sight.parameters) == 5
    assert all(seen.sight.parameters.values())
    assert all(map(torch.equal, watched.model.parameters(), plain.model.parameters()))


def test_a_wrong_gradient_at_moved_weights_is_found():
    loop = Training("embedding", torch.bfloat16)
    weight = loop.model.head.weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: (grads[0] / 2,))
    assert [defect.place for defect in loop.watched().defects] == ["head.weight"]


@pytest.mark.slow
def test_an_attack_that_autocast_does_not_see_is_found():
    """One autocast around both calls keeps its casts of the weights: the second call has those before the attack."""
    loop = Training("head", torch.bfloat16)
    seen = loop.watched(around=loop.cast)
    assert {"head"} == {defect.place for defect in seen.defects}
