"""Adversarial loops in which a discriminator is frozen for the loss of the generator, as in CycleGAN, pix2pix and
StyleGAN. Two discriminators have a loss and a backward each."""

import pytest
import torch
from support.marks import diagonal
from torch import nn
from torch.nn import functional as F

import mpcompare

WIDTH = 16


class Adversarial:
    def __init__(self, dtype):
        torch.manual_seed(0)
        self.dtype = dtype
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.judges = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)) for _ in range(2)
        )
        self.of_generator = torch.optim.Adam(self.generator.parameters(), 1e-3)
        self.of_judges = torch.optim.Adam(self.judges.parameters(), 1e-3)

    def autocast(self):
        return torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not torch.float32)

    def judge(self, made):
        self.of_judges.zero_grad()
        for judge in self.judges:
            with self.autocast():
                loss = F.softplus(-judge(torch.randn(32, WIDTH))).mean() + F.softplus(judge(made.detach())).mean()
            loss.backward()
        self.of_judges.step()

    def generate(self, made):
        self.judges.requires_grad_(False)
        self.of_generator.zero_grad()
        with self.autocast():
            loss = sum(F.softplus(-judge(made)).mean() for judge in self.judges)
        loss.backward()
        self.of_generator.step()
        self.judges.requires_grad_(True)

    def train(self, first):
        torch.manual_seed(1)
        for _ in range(2):
            with self.autocast():
                made = self.generator(torch.randn(32, 8))
            steps = [self.judge, self.generate]
            for step in steps if first == "judge" else reversed(steps):
                step(made)

    def watched(self, first):
        networks = {"G": self.generator, "D": self.judges}
        with mpcompare.watch(networks, {"of G": self.of_generator, "of D": self.of_judges}, steps=4) as seen:
            self.train(first)
        return seen


@diagonal(1, first=["judge", "generate"], dtype=[torch.float32, torch.bfloat16])
def test_a_discriminator_may_be_frozen_for_the_loss_of_the_generator(first, dtype):
    watched, plain = Adversarial(dtype), Adversarial(dtype)
    seen = watched.watched(first)
    plain.train(first)
    assert (seen.defects, seen.not_examined) == ([], [])
    assert {"G.0.weight", "D.1.2.bias"} <= seen.sight.parameters.keys()
    for a, b in zip((watched.generator, watched.judges), (plain.generator, plain.judges), strict=True):
        assert all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.slow
def test_a_wrong_gradient_of_a_discriminator_that_is_frozen_at_times_is_found():
    loop = Adversarial(torch.bfloat16)
    weight = loop.judges[1][0].weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: (grads[0] / 2,))
    assert [defect.place for defect in loop.watched("generate").defects] == ["D.1.0.weight"]


@pytest.mark.slow
def test_two_losses_of_two_networks_are_no_sum_of_micro_batches():
    loop = Adversarial(torch.bfloat16)  # within one backward autocast sums both calls of a judge in 16 bits
    for p in loop.judges.parameters():
        p.register_hook(lambda grad: grad)
    assert not loop.watched("judge").defects
