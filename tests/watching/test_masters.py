"""Loops that cast the whole network to 16 bits, and give the optimizer masters in fp32 that they make themselves."""

import contextlib

import pytest
import torch
from support.watched_loops import spoil
from torch import nn
from torch.nn import functional as F

import mpcompare
from mpcompare.errors import InputError
from mpcompare.watching.attach import attached

SCALE = {torch.bfloat16: 1.0, torch.float16: 128.0}
HALVES = list(SCALE)


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))


class Training:
    """Three updates of two micro-batches each, with clipping. The loss scale is multiplied and divided by hand."""

    def __init__(self, dtype, unscales=True, copies=lambda *_: True, rounds=False, clip=0.1):
        torch.manual_seed(0)
        net = mlp()
        self.dtype, self.unscales, self.copies, self.rounds, self.clip = dtype, unscales, copies, rounds, clip
        self.net = net.to(dtype)
        self.masters = {n: p.detach().float().requires_grad_() for n, p in self.net.named_parameters()}
        decayed = [m for m in self.masters.values() if m.dim() > 1]
        others = [m for m in self.masters.values() if m.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3)

    def train(self, watch=None):
        torch.manual_seed(1)
        with watch(self.net, self.optimizer) if watch else contextlib.nullcontext() as seen:
            for _ in range(3):
                for _ in range(2):
                    x, y = torch.randn(32, 8), torch.randint(5, (32,))
                    loss = F.cross_entropy(self.net(x.to(self.dtype)).float(), y) / 2
                    (loss * SCALE[self.dtype]).backward()
                for name, p in self.net.named_parameters():
                    self.masters[name].grad = p.grad.float() / (SCALE[self.dtype] if self.unscales else 1.0)
                    p.grad = None
                nn.utils.clip_grad_norm_(self.masters.values(), self.clip)
                self.optimizer.step()
                with torch.no_grad():
                    for name, p in self.net.named_parameters():
                        if self.rounds:
                            self.masters[name].copy_(self.masters[name].to(self.dtype))
                        if self.copies(name):
                            p.copy_(self.masters[name])
        return seen


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_a_right_loop_has_no_defect_and_trains_as_without_the_watch(dtype):
    watched, plain = Training(dtype), Training(dtype)
    seen = watched.train(mpcompare.watch)
    plain.train()
    assert (seen.defects, seen.not_examined) == ([], [])
    assert all(map(torch.equal, watched.masters.values(), plain.masters.values()))
    assert len(seen.sight.parameters) == 6
    facts = {"masters": "fp32", "clip_norm": 0.1, "micro_batches": 2, "optimizer": "AdamW", "in_no_optimizer": []}
    assert {name: seen.facts[name] for name in facts} == facts
    assert any(part.startswith("norm") for part in seen.facts["order"])
    assert seen.facts["moved_before_steps"] == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_a_wrong_gradient_is_found(dtype):
    training = Training(dtype)
    spoil(training.net[0].weight, lambda g: g * 1.1)
    seen = training.train(mpcompare.watch)
    assert [(defect.cause, defect.place) for defect in seen.defects] == [("gradient scaled", "0.weight")]


@pytest.mark.slow
def test_a_gradient_that_is_not_divided_is_a_fact():
    seen = Training(torch.float16, unscales=False, clip=1e9).train(mpcompare.watch)
    assert "gradients_times" not in seen.facts
    assert seen.facts["micro_batch_weights"] == [64, 64]
    assert Training(torch.float16, clip=1e9).train(mpcompare.watch).facts["gradients_times"] == 0.007812


def test_a_master_that_is_not_copied_to_its_weight_is_a_defect():
    seen = Training(torch.bfloat16, copies=lambda name: name != "0.weight").train(mpcompare.watch)
    assert [(defect.cause, defect.place) for defect in seen.defects] == [("stale weights", "0.weight")]


@pytest.mark.slow
def test_masters_that_the_loop_rounds_are_none():
    seen = Training(torch.bfloat16, rounds=True).train(mpcompare.watch)
    assert [defect.cause for defect in seen.defects] == ["no master weights"]


@pytest.mark.slow
def test_some_weights_may_have_masters_and_others_be_fp32():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5)).bfloat16()
    net[1].float()
    masters = {p: p.detach().float().requires_grad_() for p in net.parameters() if p.dtype is torch.bfloat16}
    optimizer = torch.optim.SGD([masters.get(p, p) for p in net.parameters()], lr=0.1, momentum=0.9)
    with mpcompare.watch(net, optimizer, steps=2) as seen:
        for _ in range(2):
            F.cross_entropy(net(torch.randn(32, 3, 3, 3).bfloat16()).float(), torch.randint(5, (32,))).backward()
            for p, master in masters.items():
                master.grad, p.grad = p.grad.float(), None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p, master in masters.items():
                    p.copy_(master)
    assert (seen.defects, seen.not_examined, seen.facts["masters"]) == ([], [], "fp32")


def test_no_weight_of_the_network_is_a_master():
    net = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 5)).bfloat16()
    net[1].float()
    optimizer = torch.optim.SGD([*net[1].parameters(), *net[2].parameters()], lr=0.1)
    assert attached(net, optimizer, eager=False).masters == {}


@pytest.mark.parametrize("change", [lambda m: m + 1, lambda m: m.bfloat16(), lambda m: m.flatten()])
def test_other_tensors_are_no_masters(change):
    net = nn.Linear(8, 5, bias=False).bfloat16()
    optimizer = torch.optim.SGD([change(net.weight.detach().float()).requires_grad_()], lr=0.1)
    with pytest.raises(InputError, match="has none of the parameters of Linear"):
        mpcompare.watch(net, optimizer)
