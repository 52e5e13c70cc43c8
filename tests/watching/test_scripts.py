"""Networks with scripts of torch.jit, which take no hooks; and a watch that cannot begin."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import mpcompare
from mpcompare.watching import looking
from mpcompare.watching.own_functions import _listeners


def within():
    return nn.Sequential(nn.Linear(4, 8), scripted(nn.Linear(8, 8)), nn.Linear(8, 2))


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


def train(make, watch):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
    return seen, list(model.parameters())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (within, "(1 is a script of torch.jit)"),
        (lambda: scripted(nn.Linear(4, 2)), "(no call of the network with gradients was seen)"),
    ],
)
def test_a_script_is_said_not_to_be_seen(make, why):
    seen, watched = train(make, mpcompare.watch)
    _, plain = train(make, lambda *given: contextlib.nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(watched, plain, strict=True))
    assert (seen.facts["updates"], seen.defects) == (2, [])
    assert any(why in each for each in seen.not_examined), seen.not_examined


def test_a_watch_that_cannot_begin_leaves_nothing(monkeypatch):
    def stop(*given):
        raise ZeroDivisionError

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(looking.Look, "_look_at_fast_paths", stop)
    with pytest.raises(ZeroDivisionError), mpcompare.watch(model, optimizer):
        pass
    assert not any((model._forward_hooks, optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks))
    assert _listeners == []
    monkeypatch.undo()
    with mpcompare.watch(model, optimizer):
        pass
