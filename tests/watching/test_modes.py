"""Modes that a loop enters while it is watched, and what a look leaves of its own modes."""

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import mpcompare


def network(*more):
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2), *more)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()


FLOPS = 2 * 4 * (4 * 8 + 8 * 2) + 2 * 4 * (4 * 8 + 2 * 8 * 2)  # of a step: forward, and backward


def left():
    return _get_current_dispatch_mode_stack() + _get_current_function_mode_stack()


@pytest.mark.parametrize("within", [1, 2, 4])
@pytest.mark.parametrize("after", [0, 1])
def test_a_counter_counts_all_steps_within_it(after, within):
    """The look begins or ends while the counter is there, or begins while it is and ends later."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=2, after=after) as seen:
        with FlopCounterMode(display=False) as counter:
            for _ in range(within):
                step(model, optimizer)
        for _ in range(4 - within):
            step(model, optimizer)
        assert left() == []
    assert counter.get_total_flops() == within * FLOPS
    assert (seen.facts["updates"], seen.defects) == (2, [])


def test_an_interrupt_in_a_forward_leaves_no_mode():
    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    model = network(Interrupted())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(KeyboardInterrupt), mpcompare.watch(model, optimizer):
        step(model, optimizer)
    assert left() == []


@pytest.mark.parametrize("counts", [False, True])
def test_nothing_is_noted_after_a_look_that_ends_within_backward(counts):
    model, drawn = network(), []
    optimizers = {name: torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters()}
    for p, optimizer in zip(model.parameters(), optimizers.values(), strict=True):
        p.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
    with FlopCounterMode(display=False) if counts else torch.enable_grad():
        with mpcompare.watch(model, optimizers, steps=1) as seen:
            for _ in range(3):
                model(torch.randn(4, 4)).square().mean().backward()
                model.zero_grad()
                drawn.append(len(seen.look.sums.calls.noted.drawn))
        assert len(left()) == counts
    assert drawn[0] == drawn[2]
    assert seen.facts["updates"] == len(optimizers)
