"""The stand-in for CUDA graphs on a CPU goes wrong in the cases in which a graph would."""

import pytest
import torch
from support.graphs import record

from mpcompare.native import graph, ops


def test_a_capture_has_no_effect_and_each_replay_has_it_once():
    w, x = torch.zeros(3), torch.ones(3)

    def step():
        w.add_(x * 2)

    replay = record(step)
    assert w.tolist() == [0, 0, 0]
    replay()
    assert w.tolist() == [2, 2, 2]
    x.fill_(5)  # inputs are read where they lie
    replay()
    assert w.tolist() == [12, 12, 12]


def test_what_the_host_decides_is_frozen():
    state = {"lr": 1.0, "w": torch.zeros(1)}
    captured = state["w"]

    def step():
        state["w"].add_(state["lr"])

    replay = record(step)
    state["lr"], state["w"] = 100.0, torch.full((1,), 7.0)
    replay()
    assert (captured.item(), state["w"].item()) == (1, 7)


@pytest.mark.parametrize("read", [torch.Tensor.item, bool, float, lambda w: torch.equal(w, w)])
def test_a_step_that_reads_a_value_cannot_be_captured(read):
    w = torch.zeros(())
    with pytest.raises(RuntimeError, match="gives the host a value"):
        record(lambda: read(w))


def test_backward_and_what_it_leaves_are_replayed():
    w, x = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0])

    def step():
        w.grad = None
        (w.square() * x).sum().backward()

    replay = record(step)
    grad = w.grad
    for value in (3.0, 4.0):
        x.fill_(value)
        replay()
        assert w.grad is grad
        assert grad.item() == 2 * 2 * value


def test_native_operators_are_replayed():
    ops.load("cpu")
    w, velocity, grad = torch.ones(4), torch.zeros(4), torch.ones(4)
    expected, its_velocity = w.clone(), velocity.clone()
    lr, scale, found_inf = torch.tensor(0.5), torch.tensor(2.0), torch.tensor(0.0)
    replay = record(lambda: torch.ops.mpcompare.sgd(w, velocity, None, grad, lr, scale, found_inf, None, momentum=0.5))
    for value in (1.0, 3.0, 5.0):
        grad.fill_(value)
        lr.fill_(value / 8)
        replay()
        torch.ops.mpcompare.sgd(expected, its_velocity, None, grad, lr, scale, found_inf, None, momentum=0.5)
        assert torch.equal(w, expected)
        assert torch.equal(velocity, its_velocity)


def test_a_step_is_warmed_up_captured_and_then_only_replayed(recorded_graphs):
    w, calls = torch.zeros(()), []

    def step():
        calls.append(1)
        w.add_(1)

    whole = graph.StepGraph(step)
    for number in range(1, 7):
        whole()
        assert w.item() == number
    assert len(calls) == graph.WARMUP + 1
