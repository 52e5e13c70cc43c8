"""The rows that each call of a network had, and a backend that takes them in another order under dropout."""

import pytest
import torch
from support.judging import beside_amp
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.tasks.batch import Tree
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.verdict.examine.forced.record import Call
from mpcompare.verdict.examine.forced.rows import as_given, targets_of

X, Y = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6)
BATCHES = [(X[:3], Y[:3]), (X[3:], Y[3:])]


def calls(*inputs):
    return [Call(list(given) if isinstance(given, tuple) else [given]) for given in inputs]


def test_rows_that_were_rounded_are_as_given():
    assert as_given(calls(X[:3].bfloat16(), X[3:].bfloat16()), BATCHES)


def test_targets_follow_rows_in_another_order_also_from_one_micro_batch_to_another():
    order = torch.tensor([4, 1, 0, 5, 2, 3])
    mixed = calls(X[order[:3]].bfloat16(), X[order[3:]].bfloat16())
    assert not as_given(mixed, BATCHES)
    assert [y.tolist() for y in targets_of(mixed, BATCHES)] == [[4, 1, 0], [5, 2, 3]]


def test_targets_of_nests_follow_their_rows():
    batch = (Tree({"a": X, "b": Y}), Tree({"y": Y}))
    (found,) = targets_of(calls((X.flip(0), Y.flip(0))), [batch])
    assert found.value["y"].tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("inputs", [(X[:3], X[:3]), (X,), (X[:2], X[2:]), (X[:3] + 1, X[3:])])
def test_calls_that_have_other_rows_have_no_targets(inputs):
    assert targets_of(calls(*inputs), BATCHES) is None


def test_equal_rows_have_targets_where_their_order_is_as_given():
    batches = [(X[[0, 0, 1]], Y[:3])]
    assert targets_of(calls(X[[0, 0, 1]]), batches) is not None
    assert targets_of(calls(X[[1, 0, 0]]), batches) is None


class Dropping(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 10))


class Backward(Amp):
    def forward(self, x, y):
        return super().forward(x.flip(0), y.flip(0))


class Mispaired(Amp):
    def forward(self, x, y):
        return super().forward(x.flip(0), y)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "word", "cause"), [(Backward, "same", ""), (Mispaired, "differs", "loss")])
def test_rows_in_another_order_under_dropout(backend, word, cause):
    task = Task(Dropping, "cross_entropy", Sgd(lr=0.1), 32, 32 * 6)
    verdict = beside_amp(backend, task, digits(0, task.samples), "bf16", steps=4)
    assert (verdict.word, verdict.cause) == (word, cause)
    assert "training (it draws other random numbers, such as masks of dropout)" in verdict.unchecked
