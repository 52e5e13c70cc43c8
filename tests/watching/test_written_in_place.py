"""Layers that return a view of another tensor, into which an activation writes. Autograd then takes the gradient
through the base of the view. And losses of features of a frozen network that writes in place."""

import copy
from dataclasses import replace

import pytest
import torch
from support.marks import diagonal
from support.watched_loops import Loop
from torch import nn
from torch.nn import functional as F

import mpcompare

LOOP = replace(
    Loop(), updates=2, clip=None, accumulate=1, batch=lambda: (torch.randn(4, 3, 6, 6), torch.randint(5, (4,)))
)


class Last(nn.Module):
    """Moves the channels to the last place."""

    def forward(self, x):
        return x.permute(0, 2, 3, 1)


class Added(nn.Module):
    """Adds its input in place."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm2d(8, affine=True)

    def forward(self, x):
        y = self.norm(x)
        y += x
        return y


class Skip(nn.Module):
    """Hands on its input after an activation has written into it, as the U-Net of pix2pix does."""

    def __init__(self):
        super().__init__()
        self.relu, self.conv = nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return x + self.conv(self.relu(x))


class SkipOfBase(nn.Module):
    """Goes on from what it has a view of, into which its activation writes."""

    def __init__(self, view):
        super().__init__()
        self.view, self.relu, self.linear = view, nn.ReLU(inplace=True), nn.Linear(16, 16)

    def forward(self, x):
        seen = self.view(x)
        return x.flatten(2) + self.linear(self.relu(seen)) + seen


class Half(nn.Module):
    """Rectifies half of the channels in place."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        self.relu(x[:, :4])
        return x


class Halved(torch.autograd.Function):
    """Doubles its input in place, and passes half of the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Wrong(nn.Module):
    def forward(self, x):
        return Halved.apply(x)


NETWORKS = {
    "instance norm": [nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.2, inplace=True), nn.Flatten()],
    "flat": [nn.Flatten(), nn.ReLU(inplace=True)],
    "two views": [Last(), nn.Unflatten(3, (2, 4)), nn.ReLU(inplace=True), nn.Flatten()],
    "added": [Added(), nn.Flatten()],
    "wrong": [nn.InstanceNorm2d(8, affine=True), Wrong(), nn.Flatten()],
    "skip": [Skip(), nn.Flatten()],
    "skip of a base": [SkipOfBase(nn.Flatten(2)), nn.Flatten()],
    "half": [Half(), nn.Flatten()],
    "dropped": [nn.InstanceNorm2d(8), nn.Dropout2d(0.5, inplace=True), nn.Flatten()],
}


def loop(name: str, dtype: torch.dtype) -> Loop:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), *copy.deepcopy(NETWORKS[name]), nn.Linear(8 * 16, 5))

    return replace(LOOP, make=make, dtype=dtype)


@diagonal(3, name=sorted(NETWORKS.keys() - {"wrong"}), dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_an_output_that_is_written_into_is_seen(name, dtype):
    watched, plain = loop(name, dtype), loop(name, dtype)
    seen = watched.run(mpcompare.watch)
    plain.run()
    assert not seen.defects
    assert not seen.not_examined
    assert all(map(torch.equal, watched.weights(), plain.weights()))


@pytest.mark.slow
def test_what_goes_on_from_the_base_of_a_written_view_is_compared():
    class Wrong(SkipOfBase):
        def forward(self, x):
            seen = self.view(x)
            y = self.linear(self.relu(seen))
            return x.flatten(2) + y * (2 if x.requires_grad and x.dtype is not torch.float64 else 1)

    made = replace(
        loop("flat", torch.float32),
        make=lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Wrong(nn.Flatten(2)), nn.Flatten(), nn.Linear(8 * 16, 5)),
    )
    assert "3" in {each.place for each in made.run(mpcompare.watch).defects}


@pytest.mark.slow
def test_a_wrong_gradient_that_comes_through_the_base_is_found():
    assert {each.place for each in loop("wrong", torch.bfloat16).run(mpcompare.watch).defects} & {"1", "2"}


class Residual(nn.Module):
    """Layers of VGG and of ResNet, with all that they do in place."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Dropout(0.1, True), nn.LeakyReLU(0.2, True))
        self.last, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.body(x)
        y = self.last(h)
        y += h
        return self.relu(y)


class OfView(nn.Module):
    """Writes into a view, and goes on from it and from what it is a view of."""

    def __init__(self):
        super().__init__()
        self.first, self.relu, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Linear(36, 4)

    def forward(self, x):
        y = self.first(x)
        return self.last(self.relu(y.flatten(2))) + y.mean()


def watched_features(network, dtype, seed):
    """Returns what a watch sees of a loop whose loss compares features of a frozen network."""
    torch.manual_seed(seed)
    features = network().requires_grad_(False)

    def loss(output, target):
        return F.mse_loss(features(output), features(target))

    def batch():
        return torch.randn(2, 3, 6, 6), torch.randn(2, 3, 6, 6)

    made = replace(LOOP, make=lambda: nn.Conv2d(3, 3, 3, padding=1), batch=batch, loss=loss, dtype=dtype)
    return made.run(mpcompare.watch)


@diagonal(2, network=[Residual, OfView], dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_a_loss_of_features_that_are_written_in_place_is_seen(dtype, network):
    seen = watched_features(network, dtype, seed=1)
    assert (seen.defects, seen.not_examined) == ([], [])
    assert seen.sight.parameters == {"weight": True, "bias": True}


@pytest.mark.slow
def test_a_replay_rounds_the_weights_of_a_frozen_network_in_the_loss():
    # With unrounded weights some units of its relu are on that are off in this loop: 7 % of a gradient.
    assert watched_features(OfView, torch.bfloat16, seed=3).defects == []
