"""Two optimizers whose gradients are cleared and made in turns, before either takes a step, as in many GANs and
actor-critic loops. Each has a sum of gradients of its own."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpcompare

UPDATES = 2


class Training:
    """A generator and a discriminator.

    Args:
        goes_through: whether the loss of the generator goes through the discriminator.
        to_none: whether gradients are cleared to None, or to 0.
        clips: whether each gradient is divided by the loss scale and clipped before the next backward.
        plant: the name of a weight whose gradient is 1 % too small.
    """

    def __init__(self, dtype, goes_through=True, to_none=True, clips=False, plant=""):
        torch.manual_seed(0)
        self.dtype, self.goes_through, self.to_none, self.clips = dtype, goes_through, to_none, clips
        self.models = {
            "generator": nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 20)),
            "discriminator": nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 1)),
        }
        self.optimizers = {n: torch.optim.Adam(model.parameters(), 1e-3) for n, model in self.models.items()}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype is torch.float16)
        if plant:
            w = nn.ModuleDict(self.models).get_parameter(plant)
            self.node = w.expand_as(w).grad_fn.next_functions[0][0]
            self.node.register_prehook(lambda grads: (0.99 * grads[0],))

    def go_back(self, name, loss):
        self.scaler.scale(loss).backward()
        if self.clips:
            self.scaler.unscale_(self.optimizers[name])
            nn.utils.clip_grad_norm_(self.models[name].parameters(), 0.01)

    def train(self):
        torch.manual_seed(1)
        cast = nullcontext() if self.dtype is torch.float32 else torch.autocast("cpu", dtype=self.dtype)
        generator, discriminator = self.models.values()
        for _ in range(UPDATES):
            self.optimizers["generator"].zero_grad(self.to_none)
            real = torch.randn(32, 20)
            with cast:
                fake = generator(torch.randn(32, 8))
                score = F.softplus(-discriminator(fake).float()) if self.goes_through else (fake.float() - real).abs()
            self.go_back("generator", score.mean())
            self.optimizers["discriminator"].zero_grad(self.to_none)
            with cast:
                score = discriminator(fake.detach()).float() - discriminator(real).float()
            self.go_back("discriminator", F.softplus(score).mean())
            for optimizer in self.optimizers.values():
                self.scaler.step(optimizer)
            self.scaler.update()

    def watched(self):
        with mpcompare.watch(self.models, self.optimizers, steps=UPDATES) as seen:
            self.train()
        return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        (torch.float32, False),
        (torch.float32, True, False),
        (torch.bfloat16,),
        (torch.float16,),
        (torch.float16, True, True, True),
        (torch.float32, False, True, True),
    ],
)
def test_each_optimizer_has_a_sum_of_its_own(given):
    watched, plain = Training(*given), Training(*given)
    seen = watched.watched()
    plain.train()
    assert (seen.defects, seen.not_examined, seen.facts["updates"]) == ([], [], 2 * UPDATES)
    assert sum(seen.sight.parameters.values()) >= 7  # of 8: the terms of a bias may cancel
    assert seen.facts["clip_norm"] == (pytest.approx(0.01, rel=1e-3) if watched.clips else None)
    for name, model in watched.models.items():
        assert all(map(torch.equal, model.parameters(), plain.models[name].parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["generator.0.weight", "discriminator.2.weight"])
def test_a_wrong_gradient_is_found_from_the_second_update_on(plant):
    training = Training(torch.float32, plant=plant)
    seen = training.watched()
    assert [(defect.cause, defect.place) for defect in seen.defects] == [("gradient scaled", plant)]
    errors = [replay.layers.gradients[plant].relative for replay in seen.replays if plant in replay.layers.gradients]
    assert errors[1:] == [pytest.approx(0.01, rel=1e-3)] * (UPDATES - 1)


@pytest.mark.slow
def test_a_discriminator_that_is_frozen_for_the_loss_of_the_generator():
    training = Training(torch.float32)
    generator, discriminator = training.models.values()
    with mpcompare.watch(training.models, training.optimizers, steps=UPDATES) as seen:
        for _ in range(UPDATES):
            for name, optimizer in reversed(training.optimizers.items()):
                optimizer.zero_grad()
                discriminator.requires_grad_(name == "discriminator")
                score = discriminator(generator(torch.randn(32, 8)) if name == "generator" else torch.randn(32, 20))
                F.softplus(-score).mean().backward()
            discriminator.requires_grad_(True)
            for optimizer in training.optimizers.values():
                optimizer.step()
    assert (seen.defects, seen.not_examined) == ([], [])
    assert all(seen.sight.parameters.values())


def test_a_part_that_two_optimizers_clear_is_not_examined():
    model = nn.ModuleDict({"both": nn.Linear(8, 8), "one": nn.Linear(8, 1), "other": nn.Linear(8, 1)})
    optimizers = [torch.optim.SGD([*model["both"].parameters(), *model[n].parameters()], 0.1) for n in ("one", "other")]
    with mpcompare.watch(model, optimizers) as seen:
        for _ in range(UPDATES):
            for name, optimizer in zip(("one", "other"), optimizers, strict=True):
                optimizer.zero_grad()
                model[name](model["both"](torch.randn(32, 8)).tanh()).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    why = "the gradients of some parameters were cleared, and others were not"
    assert seen.defects == []
    assert [why in said for said in seen.not_examined] == [True]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize("of", [torch.exp, Doubled.apply])
def test_only_what_the_loop_still_has_is_kept_of_a_network_that_is_not_watched(of):
    """A factor of the loss is made before the other network is trained."""
    torch.manual_seed(0)
    model, other = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, trains = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    power, counts = nn.Parameter(torch.zeros(())), []
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        factor = of(3 * power + 0.5)
        for _ in range(4):
            trains.zero_grad()
            other(torch.randn(8, 4)).square().mean().backward()
            trains.step()
            counts.append(len(seen.look.sums.calls.tape.events))
        (factor * model(torch.randn(8, 4)).square().mean()).backward()
        optimizer.step()
    assert counts == [counts[0]] * 4
    assert seen.defects == []
    assert [each.partition(",")[0] for each in seen.not_examined] == ["updates of SGD"]  # of the other network
    assert seen.sight.parameters["weight"]
