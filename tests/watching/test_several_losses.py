"""Losses with a backward pass each through one call of the network: all passes are examined."""

import re

import pytest
import torch
from support.marks import slow_after
from support.watched_loops import spoil
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpcompare


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))


class Heads(nn.Module):
    """Two outputs, and features in an attribute."""

    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = body(), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        self.features = self.body(x)
        return torch.cat([self.left(self.features), self.right(self.features)], 1)


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.GELU()), body()
        self.narrow, self.reentrant = nn.Linear(16, 8), reentrant

    def forward(self, x):
        return self.last(self.narrow(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)))


def left(output, y, model):
    return F.cross_entropy(output[:, :4].float(), y)


def right(output, y, model):
    return F.cross_entropy(output[:, 4:].float(), y)


def size(output, y, model):
    return output.float().square().mean()


def of_features(output, y, model):
    return model.features.float().square().mean()


def trained(model, losses, dtype=torch.bfloat16, micro_batches=1):
    """Returns the watch of two updates."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, enabled=dtype is torch.float16)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                x, y = torch.randn(32, 8), torch.randint(4, (32,))
                with torch.autocast("cpu", dtype=dtype):
                    output = model(x)
                    every = [loss(output, y, model) for loss in losses]
                for number, loss in enumerate(every, start=1):
                    scaler.scale(loss).backward(retain_graph=number < len(every))
            scaler.step(optimizer)
            scaler.update()
    return seen


CASES = {
    "two losses": (body, [left, right], 1),
    "three losses": (body, [left, right, size], 1),
    "two micro-batches": (body, [left, right], 2),
    "two heads": (Heads, [left, right, of_features], 1),
    "recomputed": (lambda: Recomputed(False), [left, right], 1),
    "recomputed, reentrant": (lambda: Recomputed(True), [left, right], 1),
}


@pytest.mark.parametrize("dtype", slow_after(1, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("case", slow_after(1, CASES))
def test_each_pass_is_examined(case, dtype):
    torch.manual_seed(0)
    make, losses, micro_batches = CASES[case]
    seen = trained(make(), losses, dtype, micro_batches)
    assert (seen.defects, seen.not_examined) == ([], []), str(seen)
    assert all(seen.sight.layers.values())


class Doubled(torch.autograd.Function):
    """A square whose gradient is a tenth too large."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return 2.2 * gradient * ctx.saved_tensors[0]


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_a_wrong_gradient_of_one_loss_is_found(place):
    torch.manual_seed(0)
    losses = [left, lambda output, y, model: right(Doubled.apply(output), y, model)]
    seen = trained(body(), losses if place else losses[::-1])
    assert {defect.cause for defect in seen.defects} == {"loss"}
    assert re.search(r"the gradient that arrives at the output in update 1 is (9|10|11)\b\S* % off", str(seen)), str(
        seen
    )


def test_what_writes_into_an_output_for_a_further_loss_is_said_not_to_be_examined():
    def written(output, y, model):
        doubled = output.float()
        doubled.mul_(2)
        return F.cross_entropy(doubled, y)

    torch.manual_seed(0)
    seen = trained(body(), [left, written])
    assert seen.defects == []
    (said,) = seen.not_examined
    assert "two backward passes go through one call of the network, and test_several_losses.py" in said


@pytest.mark.slow
def test_a_call_whose_gradients_are_asked_for_and_another_with_two_passes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        output = model(x)
        F.cross_entropy(output, y).backward(retain_graph=True)
        output.square().mean().backward()
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
        optimizer.step()
    assert (seen.defects, seen.not_examined) == ([], [])
    assert all(seen.sight.layers.values())


def surgery(wrong: bool):
    """Returns the watch of a loop that keeps the gradients of each loss, and clears them before the next loss (Yu et
    al., arXiv 2001.06782)."""
    torch.manual_seed(0)
    model, scaler = body(), torch.amp.GradScaler("cpu", init_scale=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            x, y = torch.randn(32, 8), torch.randint(4, (32,))
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(x)
                losses = [left(output, y, model), right(Doubled.apply(output) if wrong else output, y, model)]
            kept = []
            for loss in losses:
                optimizer.zero_grad()
                scaler.scale(loss).backward(retain_graph=True)
                kept.append([p.grad.clone() for p in model.parameters()])
            for p, one, other in zip(model.parameters(), *kept, strict=True):
                p.grad = (one + other) / 2
            scaler.step(optimizer)
            scaler.update()
    return seen


@pytest.mark.slow
def test_gradients_that_are_cleared_between_passes_through_one_call():
    seen = surgery(wrong=False)
    assert (seen.defects, seen.not_examined) == ([], []), str(seen)
    assert all(seen.sight.layers.values())
    assert {defect.cause for defect in surgery(wrong=True).defects} == {"loss"}


def two_heads(trunk, wrong):
    """Returns the watch of a loop that calls a trunk and two heads, with a backward for the loss of each head."""
    torch.manual_seed(0)
    heads = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)) for _ in range(2)]
    model = nn.ModuleDict({"trunk": trunk, "first": heads[0], "second": heads[1]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        if wrong:
            spoil(next(trunk.parameters()), lambda gradient: 0.5 * gradient)
        features = trunk(torch.randn(16, 8))
        losses = [F.cross_entropy(head(F.gelu(features)), torch.randint(4, (16,))) for head in heads]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        optimizer.step()
    return seen


@pytest.mark.parametrize("trunk", [lambda: nn.Linear(8, 8), pytest.param(body, marks=pytest.mark.slow)])
def test_one_trunk_of_two_heads_that_the_loop_calls(trunk):
    seen = two_heads(trunk(), wrong=False)
    assert (seen.defects, seen.not_examined) == ([], []), str(seen)
    assert all(seen.sight.layers.values())
    assert [re.sub(r"[.0]", "", defect.place) for defect in two_heads(trunk(), wrong=True).defects] == ["trunkweight"]
