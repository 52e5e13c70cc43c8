"""``mpcompare.watch``: what a loop does with gradients before a step, and with weights after it."""

from dataclasses import replace

import pytest
import torch
from support.watched_loops import Loop
from torch import nn

import mpcompare
from mpcompare.errors import InputError
from mpcompare.watching.expecting import differences, save
from mpcompare.watching.watched import WrongTraining


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def few():
    return torch.randn(16, 4), torch.randint(3, (16,))


TINY = replace(Loop(), make=three_layers, batch=few, updates=3, accumulate=1, clip=None)
FP16 = replace(TINY, dtype=torch.float16)


def each_weight(change):
    @torch.no_grad()
    def after_step(model):
        for p in model.parameters():
            p.copy_(change(p))

    return after_step


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_weights_that_the_loop_rounds_after_each_step_are_no_masters(half):
    seen = replace(TINY, after_step=each_weight(lambda p: p.to(half))).run(mpcompare.watch)
    (defect,) = seen.defects
    assert defect.cause == "no master weights"
    assert "which are fp32, to " in defect.sentence
    assert "before step 2" in defect.sentence


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda p: 0.99 * p, lambda p: p.clamp(-0.1, 0.1)])
def test_weights_that_the_loop_moves_are_a_fact(change):
    seen = replace(TINY, after_step=each_weight(change)).run(mpcompare.watch)
    assert not seen.defects
    assert "0.weight" in seen.facts["moved_between_updates"]
    assert TINY.run(mpcompare.watch).facts["moved_between_updates"] == []


def test_weights_that_move_before_a_step_are_a_fact():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        model(torch.randn(8, 4)).square().mean().backward()
        with torch.no_grad():
            model.bias.mul_(0.5)
        optimizer.step()
    assert seen.defects == []
    assert seen.facts["moved_before_steps"] == ["bias"]


def test_a_norm_that_holds_gradients_which_nobody_unscaled():
    def optimizer(params):
        return torch.optim.SGD([p for p in params if len(p) != 3], lr=0.1)  # the last layer is forgotten

    seen = replace(FP16, optimizer=optimizer, clip=1.0, updates=1).run(mpcompare.watch)
    (defect,) = seen.defects
    assert defect.cause == "clip"
    said = "2.weight, 2.bias, which this optimizer does not have and which are still multiplied by the loss scale"
    assert said in defect.sentence
    assert seen.facts["clip_norm_asked"] == 1.0


def every(*names):
    def change(model):
        for name, p in model.named_parameters():
            if not names or name in names:
                p.grad.mul_(0.5)

    return change


@pytest.mark.parametrize("loop", [FP16, replace(FP16, clip=1e4)])
def test_a_constant_factor_is_no_clip(loop):
    facts = replace(loop, before_step=every()).run(mpcompare.watch).facts
    assert facts["gradients_times"] == 0.5
    assert facts["clip_norm"] == loop.clip
    assert "clipped_updates" not in facts


def test_a_factor_of_some_gradients_names_them():
    seen = replace(TINY, updates=1, before_step=every("2.bias")).run(mpcompare.watch)
    assert sorted(seen.facts["factors"].values()) == [["0.weight", "0.bias", "2.weight"], ["2.bias"]]
    with pytest.raises(WrongTraining, match=r"clip_norm is no norm of all gradients \(factors: .*: 2.bias"):
        seen.raise_if_wrong(expect={"clip_norm": 1.0})


def test_a_parameter_group_that_is_another_is_named():
    seen = TINY.run(mpcompare.watch)
    (group,) = seen.facts["groups"]
    with pytest.raises(WrongTraining) as error:
        seen.raise_if_wrong(expect={"groups": [{**group, "lr": 0.5}]})
    assert str(error.value).splitlines()[1:] == ["  lr of group 1 is 0.001, expected 0.5"]


def test_what_is_no_expectation_is_refused():
    seen = replace(TINY, updates=1).run(mpcompare.watch)
    with pytest.raises(InputError, match="watch: expect=3: expected facts by name, or a file"):
        seen.raise_if_wrong(expect=3)


def test_expectations_that_look_as_the_card_does():
    facts = {"updates": 1, "training_mode": True, "loss_scale": None, "in_no_optimizer": [], "clip_norm": 0.1}
    assert differences(facts, {"loss_scale": "none", "in_no_optimizer": None}) == []
    assert differences(facts, {"clip_norm": None}) == ["clip_norm is 0.1, expected none"]
    said = ["updates is 1, expected '1'", "training_mode is True, expected 'True'"]
    assert differences(facts, {"updates": "1", "training_mode": "True"}) == said


def test_a_card_that_cannot_be_written_is_bad_input(tmp_path):
    with pytest.raises(InputError, match=r"^watch: save=.*/no/card.json: cannot be written \(No such file"):
        save({}, tmp_path / "no" / "card.json")


@pytest.mark.slow
def test_a_number_that_is_clamped_to_one_of_16_bits_is_a_fact():
    class Scaled(nn.Sequential):
        def __init__(self):
            super().__init__(*three_layers())
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.scale * super().forward(x)

    @torch.no_grad()
    def clamp(model):
        model.scale.clamp_(1.0, 1.0)

    seen = replace(TINY, make=Scaled, after_step=clamp).run(mpcompare.watch)
    assert not seen.defects
    assert seen.facts["moved_between_updates"] == ["scale"]


@pytest.mark.parametrize("drifts", [True, False])
def test_frozen_weights_that_move_are_a_fact(drifts):
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).mean().backward()
            optimizer.step()
            with torch.no_grad():
                model[0].weight.add_(drifts / 8)
    assert seen.facts["frozen_moved"] == (["0.weight"] if drifts else [])
    assert not seen.defects
