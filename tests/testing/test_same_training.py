"""Two loops that shall be the same, with the negative controls: each of these changes must be seen."""

import re
from dataclasses import replace

import pytest
import torch
from support.watched_loops import Loop, small_network
from torch import nn
from torch.nn import functional as F

from mpcompare.testing import DifferentTraining, assert_same_training

LOOP = Loop(updates=2)


def trains(**changes):
    return lambda watch: replace(LOOP, **changes).run(watch)


def perturbed():
    model = small_network()
    with torch.no_grad():
        model[2].weight[0, 0] += 1e-6
    return model


def halve(model):
    for p in model.parameters():
        p.grad.mul_(0.5)


def frozen(model):
    model[2].requires_grad_(False)
    return model


def coarse(model):
    model[4].eps = 1e-2
    return model


CONTROLS = {
    "halved gradients": (trains(before_step=halve), "clip_norm is 0.05 in ours"),
    "no autocast": (trains(dtype=torch.float32), "precision is fp32 in ours, bf16 in the reference"),
    "a perturbed tensor": (trains(make=perturbed), "the first weights of 2.weight are others"),
    "another loss": (
        trains(loss=lambda z, y: F.cross_entropy(z, y, label_smoothing=0.01)),
        "the gradients of .* are others in update 1",
    ),
    "another batch": (trains(seed=1), "the first weights"),
    "another rate": (
        trains(optimizer=lambda p: torch.optim.AdamW(p, lr=2e-3)), "lr of parameter group 1 is 0.002 in ours, 0.001",
    ),
    "a frozen layer": (
        trains(make=lambda: frozen(small_network())), "without_gradient is 2.bias, 2.weight in ours",
    ),
    "another setting of a norm": (trains(make=lambda: coarse(small_network())), "the gradients of .* are others"),
    "too few updates": (trains(updates=1), "ours took 1 updates"),
}  # fmt: skip


@pytest.mark.slow
def test_a_loop_is_the_same_as_itself_written_in_another_way():
    def other_way(z, y):
        z = z.float()
        return (z.logsumexp(-1) - z.gather(1, y[:, None])[:, 0]).mean()

    assert_same_training(trains(loss=other_way), trains(), steps=2)


@pytest.mark.slow
def test_numbers_that_the_loop_and_its_network_keep_in_16_bits_are_compared():
    def casting():
        model = small_network()
        model[3].forward = lambda x: F.gelu(x.bfloat16())
        return model

    def by_hand(z, y):
        return -z.log_softmax(-1).gather(1, y[:, None]).mean()

    assert_same_training(trains(make=casting, loss=by_hand), trains(make=casting), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_negative_controls(control):
    ours, line = CONTROLS[control]
    with pytest.raises(DifferentTraining, match=re.compile(line)):
        assert_same_training(ours, trains(), steps=2)


def two_blocks(factor=1.0, blocks=2):
    """Trains a network in each of some blocks; the loss in the last one is multiplied by ``factor``."""

    def run(watch):
        torch.manual_seed(0)
        for block in range(blocks):
            model = nn.Linear(4, 2, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with watch(model, optimizer):
                loss = model(torch.randn(8, 4)).square().mean()
                (factor * loss if block == 1 else loss).backward()
                optimizer.step()

    return run


def test_each_block_of_a_loop_is_compared():
    line = "^the training is not the same:\n  block 2: the gradients of weight are others in update 1$"
    with pytest.raises(DifferentTraining, match=line):
        assert_same_training(two_blocks(5.0), two_blocks(), steps=1)
    with pytest.raises(DifferentTraining, match="^ours opened 1 blocks, the reference 2$"):
        assert_same_training(two_blocks(blocks=1), two_blocks(), steps=1)


def one_layer(make):
    """Trains a layer for an update with the optimizer that ``make`` makes."""

    def run(watch):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = make(model.parameters())
        with watch(model, optimizer):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    return run


@pytest.mark.parametrize(
    ("kind", "setting", "said"),
    [
        (torch.optim.AdamW, {"maximize": True}, "maximize of parameter group 1 is True in ours, the default in the"),
        (torch.optim.RMSprop, {"alpha": 0.5}, "alpha of parameter group 1 is 0.5 in ours, the default in the"),
    ],
)
def test_a_setting_of_the_optimizer_that_is_no_usual_one(kind, setting, said):
    with pytest.raises(DifferentTraining, match=said):
        assert_same_training(one_layer(lambda p: kind(p, 0.1, **setting)), one_layer(lambda p: kind(p, 0.1)), steps=1)


def test_a_setting_that_changes_no_rule_is_no_difference():
    foreach = one_layer(lambda p: torch.optim.SGD(p, 0.1, foreach=True))
    assert_same_training(foreach, one_layer(lambda p: torch.optim.SGD(p, 0.1, foreach=False)), steps=1)
