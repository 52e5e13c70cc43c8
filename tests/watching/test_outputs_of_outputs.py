"""A network that makes one of its outputs of another: a loop uses both as without the watch."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import mpcompare


class Both(nn.Module):
    """Returns features, and what it makes of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 6)
        self.state = torch.zeros(4, 8)

    def forward(self, x, remembers=False):
        features = self.first(x).tanh()
        if not remembers:
            return self.second(features), features
        self.state = self.state + features.detach()
        return self.second(features + self.state), self.state


def penalty(model, x):
    """The length of a path in StyleGAN2."""
    y, features = model(x)
    (slope,) = torch.autograd.grad((y * torch.ones_like(y)).sum(), features, create_graph=True)
    return y.square().mean() + slope.square().mean(), features


def retained(model, x):
    y, features = model(x)
    features.retain_grad()
    return y.square().mean() + features.mean(), features


def halved(model, x):
    y, features = model(x)
    features.register_hook(lambda g: 0.5 * g)
    return y.square().mean() + features.mean(), features


def emptied(model, x):
    y, state = model(x, remembers=True)
    state.zero_()
    return y.square().mean(), state


def of_some(model, x):
    """Asks ``backward`` for the gradients of some tensors."""
    y, features = model(x)
    return y.square().mean() + features.mean(), features


def train(loop, watch):
    torch.manual_seed(0)
    model, kept = Both(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            loss, value = loop(model, torch.randn(4, 4))
            loss.backward(inputs=[value, *model.parameters()] if loop is of_some else None)
            optimizer.step()
            kept.append(value)
    grads = [value.grad for value in kept if value.retains_grad]
    return seen, [*model.parameters(), *grads]


@pytest.mark.parametrize(
    ("loop", "layers"), [(penalty, False), (retained, True), (halved, False), (emptied, True), (of_some, False)]
)
def test_a_loop_that_uses_both_outputs_trains_as_without_the_watch(loop, layers):
    seen, watched = train(loop, mpcompare.watch)
    _, plain = train(loop, lambda *given: nullcontext())
    assert len(watched) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(watched, plain, strict=True))
    assert not seen.defects, str(seen)
    assert seen.sight.parameters.get("second.weight", 0) > 0 or not layers, str(seen)
