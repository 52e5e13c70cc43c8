"""``mpcompare.watch``: the moments of an optimizer, its gradients, and steps that a scaler should have skipped."""

from dataclasses import replace

import pytest
import torch
from support.watched_loops import Loop, small_network

import mpcompare

FP16 = replace(Loop(), dtype=torch.float16, updates=2)
BF16 = replace(Loop(), updates=2)


class OwnAdamW(torch.optim.AdamW):
    """AdamW in a few lines, with its moments in ``dtype``."""

    dtype = torch.float32
    decay_in_gradient = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.update(p, p.grad, self.state[p], group)

    def update(self, p, g, state, group):
        if not state:
            zeros = torch.zeros_like(p, dtype=self.dtype)
            state.update(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())
        state["step"] += 1
        t, (beta1, beta2), decay = int(state["step"]), group["betas"], group["weight_decay"]
        if self.decay_in_gradient:
            g = g.add(p, alpha=decay)
        else:
            p.mul_(1 - group["lr"] * decay)
        state["exp_avg"].copy_(beta1 * state["exp_avg"].float() + (1 - beta1) * g)
        state["exp_avg_sq"].copy_(beta2 * state["exp_avg_sq"].float() + (1 - beta2) * g * g)
        m, v = (state[kind].float() / (1 - beta**t) for kind, beta in (("exp_avg", beta1), ("exp_avg_sq", beta2)))
        p.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))


class InBf16(OwnAdamW):
    dtype = torch.bfloat16


class InFp16(OwnAdamW):
    dtype = torch.float16


class DecayInGradient(OwnAdamW):
    decay_in_gradient = True


class AdamW(torch.optim.Optimizer):
    """Is called AdamW, and is none of torch's. Its decay is a part of the gradient, as Adam's decay is."""

    decay_in_gradient, dtype = True, torch.float32
    step, update = OwnAdamW.step, OwnAdamW.update

    def __init__(self, params, lr, weight_decay, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})


class OwnSgd(torch.optim.SGD):
    """SGD in a few lines."""

    late = False  # whether the decay comes after the momentum

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                decay = group["weight_decay"] * p
                v = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                v.mul_(group["momentum"]).add_(p.grad if self.late else p.grad + decay)
                p.sub_(group["lr"] * (v + decay if self.late else v))


class LateDecay(OwnSgd):
    late = True


def watched(of_class, loop=BF16, **settings):
    make = lambda p: of_class(p, lr=1e-2, weight_decay=0.1, **settings)  # noqa: E731
    return replace(loop, optimizer=make, updates=3).run(mpcompare.watch)


@pytest.mark.slow
@pytest.mark.parametrize("of_class", [OwnAdamW, InBf16])
def test_an_own_adamw_is_right(of_class):
    seen = watched(of_class)
    assert seen.defects == [], str(seen)
    assert seen.facts["optimizer"] == "AdamW"


@pytest.mark.slow
def test_an_own_sgd_is_right():
    assert watched(OwnSgd, momentum=0.9).defects == []


@pytest.mark.slow
def test_momentum_that_does_not_take_up_the_decay():
    (defect,) = watched(LateDecay, momentum=0.9).defects
    assert defect.cause == "moments"
    assert "momentum_buffer" in defect.sentence


@pytest.mark.parametrize("of_class", [AdamW, pytest.param(DecayInGradient, marks=pytest.mark.slow)])
def test_an_adamw_whose_decay_is_part_of_the_gradient(of_class):
    (defect,) = watched(of_class).defects
    assert defect.cause == "weight decay"


@pytest.mark.slow
def test_squares_that_fp16_does_not_hold():
    seen = watched(InFp16)
    assert {defect.cause for defect in seen.defects} == {"moments"}
    assert "are 0 after step 1" in seen.defects[0].sentence


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_moments_that_an_empty_step_has_made(rate):
    def counted(params):
        optimizer = torch.optim.AdamW(params, lr=rate, weight_decay=0.0)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 1e-3
        return optimizer

    (defect,) = replace(BF16, optimizer=counted).run(mpcompare.watch).defects
    assert defect.cause == "bias correction"
    assert "has counted 1 updates" in defect.sentence


@pytest.mark.slow
def test_gradients_that_a_norm_of_inf_makes_0():
    def clipped(model):
        for p in model.parameters():
            p.grad.mul_(0.0)

    (defect,) = replace(BF16, before_step=clipped).run(mpcompare.watch).defects
    assert defect.cause == "gradient missing"
    assert "all that the optimizer gets is 0" in defect.sentence


@pytest.mark.slow
def test_a_step_on_inf_that_the_scaler_would_skip():
    loop = replace(FP16, scale=2.0**30, clip=None)
    loop.before_step = lambda model: loop.made["optimizer"].step()
    seen = loop.run(mpcompare.watch)
    assert seen.defects[0].cause == "skip"
    assert "the loop does" in seen.defects[0].sentence


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "expected"), [(True, "accumulation"), (False, None)])
def test_micro_batches_that_are_summed_in_bf16(rounds, expected):
    def rounded(p):
        p.grad.copy_(p.grad.bfloat16())

    def make():
        model = small_network()
        for p in model.parameters() if rounds else ():
            p.register_post_accumulate_grad_hook(rounded)
        return model

    seen = replace(BF16, make=make, accumulate=32, clip=None).run(mpcompare.watch)
    assert (seen.defects[0].cause if seen.defects else None) == expected, str(seen)
