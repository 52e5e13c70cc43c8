"""What a card says where a part of a loop alone is seen."""

import torch
from torch import nn
from torch.nn import functional as F

import mpcompare
from mpcompare.watching.expecting import NOT_SEEN


class Halves(torch.optim.Optimizer):
    """Updates matrices by their directions, and other tensors as AdamW does, as some users of Muon do."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "betas" not in group:
                    p.sub_(group["lr"] * p.grad / p.grad.norm())
                    continue
                state, (beta1, beta2) = self.state[p], group["betas"]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m, v = (state[k] / (1 - b ** state["step"]) for k, b in (("exp_avg", beta1), ("exp_avg_sq", beta2)))
                p.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))


def loss_of(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(torch.randn(16, 8)), torch.randint(5, (16,)))


def test_an_optimizer_of_two_rules_is_named_with_the_parameters_of_the_unknown_one():
    model = network()
    groups = [{"params": [model[0].weight, model[2].weight]}, {"params": [model[0].bias, model[2].bias]}]
    optimizer = Halves([groups[0], groups[1] | {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}], {"lr": 1e-3})
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert seen.facts["optimizer"] == ["AdamW", "Halves"]
    assert seen.not_examined == ["updates of 0.weight, 2.weight (no update of Halves can be replayed)"]


def test_gradients_that_the_loop_sets_after_a_backward_are_named():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        loss_of(model[:2]).backward()
        for p in model[2].parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert seen.not_examined == ["the gradients of 2.bias, 2.weight, which the loop itself sets"]


def test_facts_of_layers_that_nobody_saw_are_not_known():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    names = ("precision", "autocast", "layers", "inputs", "training_mode", "micro_batches")
    assert [seen.facts[name] for name in names] == [NOT_SEEN] * len(names)
