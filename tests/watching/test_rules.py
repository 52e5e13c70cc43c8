"""The rule of each optimizer that is known, as a loop has it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mpcompare.tasks.optimizers import OPTIMIZERS, Adam, AdamW, Sgd
from mpcompare.watching.rules import is_by_name, rules_of


def known(optimizer, **settings):
    """Returns the rules of an optimizer in our terms. None stands for the optimizer's own code."""
    group = {**optimizer.param_groups[0], **settings}
    (p,) = group.pop("params")
    return [rule.known for rule in rules_of(optimizer, group, optimizer.state[p])]


def parameters():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return [p]


@pytest.mark.parametrize("ours", OPTIMIZERS)
def test_each_is_held_to_its_rule_before_its_first_update_and_after_it(ours):
    optimizer = ours(0.5, weight_decay=0.25).make(parameters())
    for _ in range(2):
        assert known(optimizer) == [ours(1.0, weight_decay=0.25)]
        optimizer.step()


def test_settings_may_be_tensors():
    optimizer = torch.optim.Adam(parameters())
    betas = [torch.tensor(0.5), torch.tensor(0.75)]
    assert known(optimizer, lr=torch.tensor(0.1), betas=betas, weight_decay=torch.tensor(0.25)) == [
        Adam(1.0, (0.5, 0.75), weight_decay=0.25)
    ]


def test_a_setting_that_ours_has_not_leaves_the_optimizer_its_own_code():
    assert known(torch.optim.SGD(parameters(), momentum=0.5, dampening=0.5)) == [None]
    assert known(torch.optim.NAdam(parameters())) == [None]


def test_values_that_ours_does_not_take_are_those_of_another_rule():
    class Decays(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1, betas=(0.9, 0.9, 0.9), eps=0.0):
            super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.mul_(1 - self.param_groups[0]["lr"])

    assert known(Decays(parameters())) == [None]


def test_an_adam_whose_decay_is_decoupled_is_an_adamw():
    assert known(torch.optim.Adam(parameters(), weight_decay=0.1), decoupled_weight_decay=True) == [
        AdamW(1.0, weight_decay=0.1)
    ]


def test_an_optimizer_of_a_library_may_be_one_whose_settings_it_has():
    class Fused(torch.optim.SGD):
        """As a library's."""

    class FusedAdam(torch.optim.Adam):
        """As a library's."""

    assert known(Fused(parameters(), momentum=0.5)) == [Sgd(1.0, 0.5), None]
    assert known(FusedAdam(parameters()), weight_decay=0.0) == [AdamW(1.0, weight_decay=0.0), None]
    with_decay = [AdamW(1.0, weight_decay=0.1), replace(Adam(), lr=1.0, weight_decay=0.1), None]
    assert known(FusedAdam(parameters(), weight_decay=0.1)) == with_decay


@pytest.mark.parametrize("name", ["SGD", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "PagedAdamW8bit", "AdamOfMlx"])
def test_a_name_may_say_that_an_optimizer_has_a_known_rule(name):
    assert is_by_name(type(name, (torch.optim.Optimizer,), {})(parameters(), {}), {})


@pytest.mark.parametrize("name", ["SignSGD", "SGDW", "NAdam", "AdamP", "StableAdamW", "AdamWScheduleFree", "AdamMini"])
def test_a_name_that_says_more_does_not(name):
    assert not is_by_name(type(name, (torch.optim.Optimizer,), {})(parameters(), {}), {})
