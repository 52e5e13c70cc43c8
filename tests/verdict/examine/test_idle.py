"""Parameters without a gradient in a step: their names, and whether they moved."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from planted.branches import BASE, GradientsStay, make
from support.backends import BACKENDS
from support.branches import Branches, branched
from support.judging import examined
from support.marks import diagonal

from mpcompare.tasks.losses import cross_entropy
from mpcompare.tasks.optimizers import Adam, AdamW
from mpcompare.verdict.examine.aged import UPDATES
from mpcompare.verdict.examine.idle import idle, moved, reached

HEADS = [{f"heads.{number}.weight", f"heads.{number}.bias"} for number in range(3)]


def network_and_batches(*kinds):
    torch.manual_seed(0)
    data = branched(0, 8 * len(kinds), 5, 3, 8, kinds)
    rows = [slice(8 * number, 8 * number + 8) for number in range(len(kinds))]
    return Branches(5, 6, 3, 3), [(data.x_train[r], data.y_train[r]) for r in rows]


def gradients(network, batches):
    network.zero_grad()
    for x, y in batches:
        cross_entropy(network(x), y).backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def test_the_loss_reaches_what_autograd_gives_a_gradient():
    for kinds in ((0,), (2, 1), (0, 1, 2)):
        network, batches = network_and_batches(*kinds)
        grads = gradients(network, batches)
        assert reached(network, cross_entropy, batches) == set(grads)


def test_a_gradient_that_is_missing_or_0_for_no_reason_is_none():
    network, batches = network_and_batches(0)
    weights = {name: p.detach() for name, p in network.named_parameters()}
    grads = gradients(network, batches)
    assert idle(network, cross_entropy, batches, grads, weights, {}) == HEADS[1] | HEADS[2]
    grads["heads.1.bias"] = torch.zeros(3)  # the loss does not depend on this bias
    grads["norm.bias"] = torch.zeros(6)  # the loss depends on this one
    assert idle(network, cross_entropy, batches, grads, weights, {}) == HEADS[1] | HEADS[2]
    assert idle(network, cross_entropy, batches, {}, weights, {}) == set()  # nothing is shown, and nothing known
    after = {**weights, "heads.2.bias": weights["heads.2.bias"] + 1}
    assert moved(frozenset(HEADS[2]), weights, after) == {"heads.2.bias": True, "heads.2.weight": False}


@diagonal(1, name=["amp", "fp32", "master_weights"], optimizer=[BASE.optimizer, Adam(1e-3)])
def test_backends_leave_an_unused_branch_alone(name, optimizer):
    task, data = make(optimizer=optimizer)
    precision = "fp32" if name == "fp32" else "bf16"
    findings = examined(name, BACKENDS[name], task, data, precision, steps=4).findings
    first = findings.first
    assert [set(tensors) for tensors in first.idle] == [HEADS[1], HEADS[0], HEADS[1], HEADS[0]]
    assert not any(tensors[name] for tensors in first.idle for name in tensors)
    assert all(e.excess <= 1 for update in first.updates for e in update.values())
    counts = findings.aged.counts  # the branch of the aged step counts on, and the other branch does not
    assert {name: c.count - UPDATES for name, c in counts.items() if "heads" in name} == {
        name: float("heads.0" in name) for head in HEADS[:2] for name in head
    }
    assert all(c.count == c.should_count for c in counts.values())


@pytest.mark.slow
def test_a_gradient_of_0_is_found_to_move_a_branch():
    task, data = make()
    first = examined("stays", GradientsStay, task, data, "bf16", steps=4).findings.first
    assert [sorted(n for n, has_moved in tensors.items() if has_moved) for tensors in first.idle] == [
        [], sorted(HEADS[0]), sorted(HEADS[1]), sorted(HEADS[0]),
    ]  # fmt: skip


@pytest.mark.slow
def test_micro_batches_of_several_branches_are_told_apart():
    task, _ = make(accumulate=4)
    data = branched(0, 640, 16, 10, 8, [1, 0, 0, 0])
    findings = examined("amp", BACKENDS["amp"], task, data, "bf16", steps=2).findings
    assert findings.first.idle == []
    errors = findings.first.finite.gradients
    assert set(errors) == {name for name, _ in task.model().named_parameters()}
    assert max(e.relative for e in errors.values()) < 0.05
    assert findings.first.finite.micro_batches.counts == pytest.approx([1, 1, 1, 1], abs=0.02)


@pytest.mark.slow
def test_a_network_without_branches_costs_no_step_more():
    task, data = make(model=partial(Branches, 16, 32, 10, 1), optimizer=AdamW(1e-3))
    data = replace(data, x_train=data.x_train.clone().index_fill_(1, torch.tensor([0]), 0))
    first = examined("amp", BACKENDS["amp"], task, data, "bf16", steps=2).findings.first
    assert (len(first.steps), first.idle) == (3, [])
