"""A function of torch that a backend replaces changes its replays, too. An exact step from before the backend tells."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from support.tasks import make_batch, make_task

from mpcompare.precision import PRECISIONS
from mpcompare.verdict.examine.exact_values import Problem
from mpcompare.verdict.examine.lent import _few_rows, patches_torch

TASK = make_task()
BF16 = PRECISIONS["bf16"]


def values():
    """Returns exact values that the clean process has computed already."""
    device = torch.device("cpu")
    problem = Problem(TASK.new_model(0, device), TASK.loss_fn, [make_batch(TASK, device)])
    few = _few_rows(problem, BF16)
    return SimpleNamespace(clean=True, problem=problem, once=lambda *_: few)


def test_a_function_of_torch_that_was_replaced_is_found(monkeypatch):
    shared = values()
    assert not patches_torch(shared, BF16)
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *arguments: (1 + 2**-18) * linear(*arguments))
    assert patches_torch(shared, BF16)


def test_a_replaced_backward_is_found(monkeypatch):
    shared = values()
    relu = F.relu
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: relu(x) + 2**-12 * (x - x.detach()))
    assert patches_torch(shared, BF16)
