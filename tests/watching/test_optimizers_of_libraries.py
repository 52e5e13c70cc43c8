"""Optimizers as libraries have them: an optimizer with a rule of its own has no defect."""

import pytest
import torch
from support.marks import diagonal, slow_after
from torch import nn
from torch.nn import functional as F

import mpcompare


class OfKernels(torch.optim.Optimizer):
    """An optimizer of kernels that leave weights in float64 as they are, as bitsandbytes' kernels do on a CPU."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    def moved(self, p, mean, square, count):
        return (mean / (1 - 0.9**count)) / ((square / (1 - 0.999**count)).sqrt() + 1e-8)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(state1=torch.zeros_like(p), state2=torch.zeros_like(p), step=0)
                state["step"] += 1
                state["state1"].lerp_(p.grad, 0.1)
                state["state2"].lerp_(p.grad.square(), 0.001)
                if p.dtype is torch.float32:
                    p.sub_(self.moved(p, state["state1"], state["state2"], state["step"]), alpha=group["lr"])


class Adam8bit(OfKernels):
    """An optimizer of such kernels, whose name says that it is Adam."""


class Means(torch.optim.Optimizer):
    """Keeps the means of Adam; ``move`` takes them."""

    def move(self, p, mean, square, group):
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                self.move(p, state["exp_avg"], state["exp_avg_sq"], group)


class WithCount(Means):
    """Adam that adds eps before the bias correction, and counts in its group, as in pytorch_optimizer."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "step": 0})

    def move(self, p, mean, square, group):
        first, second = (1 - beta ** group["step"] for beta in group["betas"])
        p.addcdiv_(mean, square.sqrt().add_(group["eps"]).div_(second**0.5), value=-group["lr"] / first)


class AdamC(WithCount):
    """The optimizer above, with a name that says that it is Adam."""


class Navi(Means):
    """Adam without a bias correction, whose name does not say that it is Adam, as EmoNavi."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    def move(self, p, mean, square, group):
        p.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])


class Averaged(torch.optim.Optimizer):
    """SGD that remembers a gradient, though its momentum is 0."""

    def __init__(self, params, lr=1e-2, momentum=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                kept.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                p.add_(kept, alpha=-group["lr"])


@pytest.mark.parametrize("kind", slow_after(2, [OfKernels, Adam8bit, WithCount, AdamC, Navi, Averaged]))
def test_an_optimizer_of_a_library_has_no_defect(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5))
    optimizer = kind(model.parameters())
    with mpcompare.watch(model, optimizer, steps=3) as seen:
        for _ in range(3):
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(5, (16,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert seen.defects == [], str(seen)
    assert seen.facts["updates"] == 3


class AtRandom(torch.optim.Optimizer):
    """SGD that rounds weights in bf16 at random, or to the nearest."""

    def __init__(self, params, lr, at_random):
        super().__init__(params, {"lr": lr, "at_random": at_random})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                bits = (p.float() - group["lr"] * p.grad.float()).view(torch.int32)
                below = torch.randint_like(bits, 1 << 16) if group["at_random"] else 1 << 15
                p.copy_(((bits + below) & -65536).view(torch.float32))


@diagonal(trained=["all", "few"], at_random=[False, True])
def test_weights_in_16_bits_may_be_rounded_at_random(at_random, trained):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5)).bfloat16()
    model.requires_grad_(trained == "all")
    model[1].weight.requires_grad_()
    optimizer = AtRandom([p for p in model.parameters() if p.requires_grad], lr=1e-2, at_random=at_random)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            x, y = torch.randn(16, 8).bfloat16(), torch.randint(5, (16,))
            F.cross_entropy(model(x).float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ("no master weights" in [defect.cause for defect in seen.defects]) is not at_random, str(seen)
    assert not (at_random and seen.defects), str(seen)
