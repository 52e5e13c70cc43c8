"""Clipping, scaling and skipping at a wrong place in a loop, and loops of the same form that are right."""

import re
from dataclasses import replace

import pytest
import torch
from support.marks import diagonal
from support.watched_loops import Loop
from torch import nn
from torch.nn import functional as F

import mpcompare


def few() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 4), torch.randint(3, (8,))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))


TINY = replace(Loop(), make=two_layers, batch=few, updates=2, accumulate=2, clip=None)


def told(seen) -> list[str]:
    """The defects, without the lines of the code."""
    return [f"{defect.cause}: {defect.sentence}" for defect in seen.defects]


@pytest.mark.parametrize(("norm", "defects"), [(0.01, 1), (100.0, 0)])
def test_clipping_after_each_backward_of_a_sum(norm, defects):
    """A clip that never binds changes nothing."""
    loop = replace(TINY, after_backward=lambda model: nn.utils.clip_grad_norm_(model.parameters(), norm))
    found = told(loop.run(mpcompare.watch))
    assert len(found) == defects
    assert all(each.startswith("clip: gradients are clipped to 0.01 (test_steps_gone_wrong.py:") for each in found)


def test_gradients_of_0_that_are_clipped_after_each_backward_are_not_cleared():
    """The second layer is 0 at first, as the B of LoRA is."""

    def with_0():
        model = two_layers()
        nn.init.zeros_(model[1].weight)
        return model

    loop = replace(TINY, make=with_0, after_backward=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 100.0))
    seen = loop.run(mpcompare.watch)
    assert (seen.defects, seen.not_examined) == ([], [])


def test_clipping_between_two_losses_may_be_meant():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            x, y = few()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            model(x).square().mean().backward()
            optimizer.step()
    assert seen.defects == []
    assert "the loop clips the gradients between its backward passes" in seen.not_examined[0]


@pytest.mark.parametrize(
    ("before", "after"), [(None, 0.01), (0.01, 0.001), pytest.param(None, float("inf"), marks=pytest.mark.slow)]
)
def test_clipping_after_the_step(before, after):
    """A loop that clipped before the step, or that only asks for the norm, is right."""
    loop = replace(TINY, clip=before, after_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), after))
    found = told(loop.run(mpcompare.watch))
    assert bool(found) == (before is None and after == 0.01)
    assert all("after the step that used them, and not before" in each for each in found)


def test_noise_and_a_clip_of_gradients_that_are_still_scaled():
    """After noise no factor tells of the clip. The norm of the optimizer's gradients tells."""

    def noised(model):
        for p in model.parameters():
            p.grad += 1e-2 * torch.randn_like(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def unscaled(model):
        loop.made["scaler"].unscale_(loop.made["optimizer"])
        noised(model)

    loop = replace(TINY, dtype=torch.float16, accumulate=1, before_step=unscaled)
    seen = loop.run(mpcompare.watch)
    assert seen.defects == []
    seen.raise_if_wrong(expect={"clip_norm": 0.1})
    (found,) = told(replace(loop, before_step=noised).run(mpcompare.watch))
    assert found.startswith(
        "clip: the gradients are clipped to a norm of 0.1 before they are divided by the loss scale"
    )


@diagonal(meant=[True, False], by=["norm", "value"])
def test_gradients_that_are_clipped_while_they_are_scaled(by, meant):
    """A user may multiply the norm by the scale on purpose. The product has more digits than a written number."""

    def clipped(model):
        scale = loop.made["scaler"].get_scale() if meant else 1.0
        if by == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.003 * scale)
        else:
            nn.utils.clip_grad_value_(model.parameters(), 0.003 * scale)

    loop = replace(TINY, dtype=torch.float16, accumulate=1, before_step=clipped)
    found = told(loop.run(mpcompare.watch))
    assert len(found) == (not meant)
    assert all("to a norm of 0.003 before" in each or "clamped to 0.003 before" in each for each in found)


@pytest.mark.parametrize("early", [True, False])
def test_a_loss_scale_that_is_updated_between_two_optimizers(early):
    """The gradients of the second optimizer are divided by another scale than their loss was multiplied by."""
    model = two_layers()
    one, other = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    with mpcompare.watch(model, {"one": one, "other": other}, steps=2) as seen:
        for _ in range(2):
            x, y = few()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x).float(), y)
            one.zero_grad()
            other.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(one)
            if early:
                scaler.update()
            scaler.step(other)
            scaler.update()
    found = told(seen)
    assert len(found) == early
    assert all("the loss was multiplied by 64, and its gradients are divided by 128" in each for each in found)


@pytest.mark.parametrize("early", [True, False])
def test_an_overflow_that_the_loop_hides_from_the_scaler(early):
    """After the scaler has looked, the step is left out, and the scale falls."""

    def zeroed(model):
        if not early:
            loop.made["scaler"].unscale_(loop.made["optimizer"])
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)

    loop = replace(TINY, dtype=torch.float16, scale=2.0**24, accumulate=1, before_step=zeroed)
    found = told(loop.run(mpcompare.watch))
    assert len({each[:5] for each in found}) == early
    assert all("nan_to_num at test_steps_gone_wrong.py" in each for each in found)


@pytest.mark.parametrize("nan_in", ["loss", "gradient", ""])
def test_a_loop_of_which_every_step_is_skipped(nan_in):
    """A loop that overflows at first, and finds a scale, is right."""

    def loss(z, y):
        if nan_in == "gradient":
            z = z + 0 * (z - z).sqrt()
        return F.cross_entropy(z.float() if nan_in != "loss" else (z.float() - 1e9).log(), y)

    scale = 8.0 if nan_in else 2.0**24
    loop = replace(TINY, dtype=torch.float16, scale=scale, updates=8, accumulate=1, loss=loss)
    found = told(loop.run(mpcompare.watch))
    assert len(found) == bool(nan_in)
    assert all(each.startswith("inf or NaN: all 8 steps are skipped: ") for each in found)


@pytest.mark.parametrize("unscaled", [0, 1, 2])
def test_a_clip_of_the_gradients_of_two_optimizers(unscaled):
    """The norm is one of all gradients. A loop that clips must have divided all of them by the loss scale."""
    model = two_layers()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with mpcompare.watch(model, optimizers, steps=2) as seen:
        x, y = few()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        for each in optimizers[:unscaled]:
            scaler.unscale_(each)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for each in optimizers:
            scaler.step(each)
    causes = [
        "the gradients are clipped to a norm of 0.1 before they are divided by the loss scale 64 in step 1",
        "holds the gradients of 1.weight, 1.bias, which this optimizer does not have and which are still multiplied by",
    ][unscaled : unscaled + 1]
    assert len(seen.defects) == len(causes)
    assert all(cause in str(defect) for cause, defect in zip(causes, seen.defects, strict=True))
    assert (seen.facts["clip_norm"] == 0.1) == (unscaled == 2)
    assert seen.facts["clip_place"] == ("after unscaling" if unscaled == 2 else "before unscaling")


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_clip_of_all_gradients_also_of_those_made_in_turns_or_in_no_optimizer(by_hand):
    model = two_layers()
    one, other = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with mpcompare.watch(model, other if by_hand else [one, other], steps=2) as seen:
        x, y = few()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if by_hand:
            for p in model.parameters():
                p.grad.div_(64.0)
        else:
            other.zero_grad()
            scaler.scale(F.cross_entropy(model[1](model[0](x).detach()), y.flip(0))).backward()
            scaler.unscale_(one)
            scaler.unscale_(other)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        one.step()
        other.step()
    assert (seen.defects, seen.facts["clip_norm"]) == ([], 0.01)


def test_a_clip_for_one_optimizer_is_none_for_another():
    model = two_layers()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    with mpcompare.watch(model, optimizers, steps=1) as seen:
        x, y = few()
        F.cross_entropy(model(x), y).backward()
        model[0].bias.grad.mul_(0.5)
        nn.utils.clip_grad_norm_(model[1].parameters(), 100.0)
        for each in optimizers:
            each.step()
    assert seen.facts["factors"] == {"1": ["0.weight"], "0.5": ["0.bias"]}


def each_apart(model):
    for number, layer in enumerate(model, start=1):
        nn.utils.clip_grad_norm_(layer.parameters(), 0.01 * number)


def by_hand(model):
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    for p in model.parameters():
        p.grad.mul_(0.03 / norm)


@pytest.mark.parametrize(("clip", "norm"), [(each_apart, [0.01, 0.02]), (by_hand, 0.03)])
def test_a_clip_for_each_of_two_optimizers_and_one_by_hand_for_both(clip, norm):
    model = two_layers()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    with mpcompare.watch(model, optimizers, steps=2) as seen:
        x, y = few()
        F.cross_entropy(model(x), y).backward()
        clip(model)
        for each in optimizers:
            each.step()
    assert (seen.defects, seen.facts["clip_norm"]) == ([], norm)


def idle(model, optimizer, between=lambda step: None, updates=2):
    """Trains, and returns what is seen; ``between`` is called before each step with its number."""
    with mpcompare.watch(model, optimizer, steps=updates) as seen:
        for step in range(updates):
            x, y = few()
            F.cross_entropy(model(x), y).backward()
            between(step)
            optimizer.step()
    return seen


@pytest.mark.parametrize("times", [2, 1])
def test_gradients_that_are_cleared_before_each_step(times):
    """A loop may leave out one update on purpose."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = idle(model, optimizer, lambda step: optimizer.zero_grad() if step < times else None)
    sentence = r"backward makes gradients of norm [\d.]+, and they are cleared before the step: the optimizer gets none"
    assert [bool(re.match(sentence + " in 2 steps", defect.sentence)) for defect in seen.defects] == [True] * (
        times - 1
    )


def test_a_look_of_one_update_may_meet_the_one_that_is_left_out():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert idle(model, optimizer, lambda step: optimizer.zero_grad(), updates=1).defects == []


def test_an_optimizer_of_frozen_parameters_alone():
    model = two_layers()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model[0].requires_grad_(False)
    seen = idle(model, optimizer)
    assert told(seen) == ["gradient missing: the optimizer moves nothing: all of its parameters are frozen"]


def test_an_optimizer_may_wait_while_another_trains():
    model = two_layers()
    both = {"first": torch.optim.SGD(model[0].parameters(), lr=0.1), "head": torch.optim.SGD(model[1].parameters())}
    model[0].requires_grad_(False)
    with mpcompare.watch(model, both, steps=1) as seen:
        F.cross_entropy(model(few()[0]), few()[1]).backward()
        for optimizer in both.values():
            optimizer.step()
    assert (seen.defects, seen.verdict) == ([], "no defect")


def test_a_step_before_all_training_is_no_defect():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        optimizer.step()
    assert (seen.defects, seen.verdict) == ([], "gradients not seen")


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_that_are_0_before_each_step_are_not_said_to_hold_earlier_ones(foreach):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    seen = idle(model, optimizer, lambda step: optimizer.zero_grad(set_to_none=False))
    assert [defect.cause for defect in seen.defects] == ["gradient missing"]
