"""The duties of every optimizer, whatever its rule is."""

import pytest
import torch
from torch import nn

import mpcompare


class Own(torch.optim.Optimizer):
    """An optimizer of a user's own. ``moves`` makes the step of one parameter."""

    moves = None

    def __init__(self, groups, **settings):
        super().__init__(groups, {"lr": 0.125, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.moves(p, group)


def downhill(own, p, group):
    p.sub_(group["lr"] * p.grad)


def uphill(own, p, group):
    p.add_(group["lr"] * (p.grad + 1e-3 * p))


def trusts(own, p, group):
    p.sub_(group["lr"] * p.norm() * p.grad / p.grad.norm())


def by_norm_or_1(own, p, group):
    p.sub_(group["lr"] * (p.norm() if p.any() else 1.0) * p.grad / p.grad.norm())


def said(moves, model=None, dtype=torch.float32, besides=None, **settings):
    """Returns the defects of a watched loop; ``besides`` is what its optimizer has besides groups and state."""
    torch.manual_seed(0)
    model = (model or nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))).to(dtype)
    optimizer = type("Own", (Own,), {"moves": moves})(model.parameters(), **settings)
    optimizer.besides = besides
    with mpcompare.watch(model, optimizer, steps=3) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.randn(32, 8, dtype=dtype)) - 1).float().square().mean().backward()
            optimizer.step()
    return [(defect.cause, defect.place) for defect in seen.defects]


def test_an_optimizer_goes_downhill():
    assert said(uphill) == [("optimizer", "0.weight")]
    assert said(downhill) == []


def test_an_optimizer_may_maximize_or_have_more_than_is_known():
    assert said(uphill, maximize=True) == []
    assert said(uphill, besides=nn.Linear(1, 1)) == []
    assert said(uphill, lr=-0.125) == []


def without_bias():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    nn.init.zeros_(model[0].bias)
    return model


def test_what_has_a_gradient_moves():
    assert said(trusts, without_bias()) == [("update left out", "0.bias")]
    assert said(by_norm_or_1, without_bias()) == []
    assert said(trusts, without_bias(), prox=1.0) == []
    assert said(trusts, without_bias(), update_bias=False) == []


def test_weights_in_16_bits_move_if_others_do():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 64), nn.Parameter(torch.ones(64))

        def forward(self, x):
            return (self.layer(x) * self.scale).view(-1, 8, 8).sum(-1)

    def by_norm(own, p, group):  # no element by itself, so that its code is no rule
        p.sub_(2.0**-10 * torch.sign(p.grad) * (p.grad.norm() > 0) + 0 * p.sum())

    assert said(by_norm, Scaled(), dtype=torch.bfloat16) == [("no master weights", "scale")]


def test_a_clip_of_a_loss_of_the_weights_alone_is_no_decay():
    """Its gradients are parallel to the weights."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        loss = sum(p.square().sum() for p in model.parameters()) + 0 * model(torch.randn(8, 4)).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert seen.defects == []
    assert "decay_in_gradients" not in seen.facts


@pytest.mark.parametrize(("decay", "maximize"), [(-0.5, False), (0.5, False), (-0.5, True), (0.0, False)])
def test_a_decay_in_the_gradients_is_added(decay, maximize):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=maximize)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            for p in model.parameters():
                p.grad.add_(p.detach(), alpha=decay)
            optimizer.step()
    assert seen.facts.get("decay_in_gradients") == (decay or None)
    grows = decay < 0 and not maximize
    assert [defect.cause for defect in seen.defects] == ["weight decay"] * grows
