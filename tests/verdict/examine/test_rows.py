"""The rows that each call of a network had, and a backend that takes them in another order under dropout."""

import re
from functools import partial

import pytest
import torch
from support.judging import compared_with_amp
from support.marks import slow_rows
from torch import nn
from torch.utils._pytree import tree_flatten

from mpcompare.backends.amp import Amp
from mpcompare.tasks.batch import Tree
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.verdict.examine.forced.record import Call
from mpcompare.verdict.examine.forced.rows import as_given as as_given_in
from mpcompare.verdict.examine.forced.rows import has_other_whole_numbers, is_rounded
from mpcompare.verdict.examine.forced.rows import rows_of as rows_of_in

X, Y = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6)
BATCHES = [(X[:3], Y[:3]), (X[3:], Y[3:])]


as_given, rows_of = (partial(each, storage=torch.bfloat16) for each in (as_given_in, rows_of_in))


def calls(*inputs):
    return [Call(list(given) if isinstance(given, tuple) else [given]) for given in inputs]


def test_rows_that_were_rounded_are_as_given():
    assert as_given(calls(X[:3].bfloat16(), X[3:].bfloat16()), BATCHES)
    assert is_rounded(X.half(), X, torch.float16)
    assert is_rounded(X.clone(), X, torch.float32)


def test_rows_that_were_rounded_to_fewer_digits_than_the_precision_has_are_other_rows():
    assert not is_rounded(X.half().float(), X, torch.float32)
    assert not is_rounded(X.bfloat16().float(), X, torch.float16)
    assert not is_rounded(X * 0.995, X, torch.bfloat16)


def test_whole_numbers_are_never_rounded():
    ids = torch.arange(900, 906)
    assert is_rounded(ids.int(), ids, torch.bfloat16)
    assert not is_rounded(ids.bfloat16().long(), ids, torch.bfloat16)
    assert not is_rounded(ids > 902, ids > 903, torch.bfloat16)


def test_other_whole_numbers_are_seen_in_any_order():
    ids, order = torch.arange(300, 324).view(6, 4), torch.tensor([4, 1, 0, 5, 2, 3])
    batches = [(Tree({"image": X[:3], "ids": ids[:3]}), Y[:3]), (Tree({"image": X[3:], "ids": ids[3:]}), Y[3:])]

    def others(ids):
        x, ids = X[order] + 1, ids[order]
        return has_other_whole_numbers(calls((x[:2], ids[:2]), (x[2:], ids[2:])), batches)

    assert not others(ids)
    assert not others(ids.int())
    assert not others(ids[:, 1:])  # fewer numbers, as without padding
    assert not others(ids.float() + 1)  # real numbers are compared elsewhere
    assert others(ids.bfloat16().long())
    assert others(ids + (ids > 310).long())


def test_tensors_of_whole_numbers_may_be_given_in_another_order_and_by_name():
    ids, kinds = torch.arange(300, 324).view(6, 4), torch.arange(24).view(6, 4) % 2
    mask = torch.ones_like(ids)
    batches = [(Tree({"mask": mask, "kinds": kinds, "ids": ids}), Y)]
    for given in ((ids, mask, kinds), (ids, kinds), (kinds, ids.float(), mask)):  # no mask, or real ids
        assert not has_other_whole_numbers(calls(given), batches)
    assert has_other_whole_numbers(calls((ids, kinds, kinds)), batches)
    assert not as_given(calls((ids, mask, kinds)), batches)
    inputs, nest = tree_flatten(((), {"ids": ids, "mask": mask, "kinds": kinds}))
    assert as_given([Call(inputs, arguments=nest)], batches)


def test_rows_of_other_numbers_are_in_order_where_each_is_nearest_to_its_own():
    x = X.to(torch.float8_e4m3fn).float()
    assert as_given(calls(x[:3], x[3:]), BATCHES)
    assert not as_given(calls(x[[1, 0, 2]], x[3:]), BATCHES)
    assert not as_given(calls(torch.zeros(3, 2, 3), x[3:]), BATCHES)
    assert not as_given(calls(x[3:], x[:3]), BATCHES)
    single = [(X[:1], Y[:1]), (X[1:2], Y[1:2])]
    assert as_given(calls(x[:1], x[1:2]), single)
    assert not as_given(calls(X[1:2], X[:1]), single)
    with_ids = [(Tree({"ids": Y, "image": X[[0, 0, *range(2, 6)]]}), Y)]  # two rows are equal
    assert as_given(calls((Y, x[[0, 0, *range(2, 6)]])), with_ids)


def rows(*inputs, batches=BATCHES):
    found = rows_of(calls(*inputs), batches)
    return found and [each.tolist() for each in found]


def test_rows_are_known_in_another_order_also_from_one_micro_batch_to_another():
    order = torch.tensor([4, 1, 0, 5, 2, 3])
    assert not as_given(calls(X[order[:3]], X[order[3:]]), BATCHES)
    assert rows(X[order[:3]].bfloat16(), X[order[3:]].bfloat16()) == [[4, 1, 0], [5, 2, 3]]


@pytest.mark.parametrize("parts", [(6,), (2, 4), (1, 2, 3)])
def test_rows_are_known_in_parts(parts):
    assert [len(each) for each in rows(*X.split(parts))] == list(parts)
    assert [row for each in rows(*X.split(parts)) for row in each] == list(range(6))


def test_rows_of_nests_are_known():
    assert rows((X.flip(0), Y.flip(0)), batches=[(Tree({"a": X, "b": Y}), Y)]) == [[5, 4, 3, 2, 1, 0]]


@pytest.mark.parametrize("inputs", [(X[:3], X[:3]), (X[:3],), (X[:3] + 1, X[3:]), (X[..., :2],), ()])
def test_rows_that_are_not_those_of_the_batches_are_not_known(inputs):
    assert rows(*inputs) is None


def test_of_equal_rows_nobody_knows_the_order():
    batches = [(X[[0, 0, 1]], Y[:3])]
    assert as_given(calls(X[[0, 0, 1]]), batches)
    assert rows(X[[1, 0, 0]], batches=batches) is None


class Dropping(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 10))


class Wide(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 24), nn.GELU(), nn.Linear(24, 10))


class Normed(nn.Sequential):
    """A network in which one rounding travels. Its layers are replayed."""

    def __init__(self):
        norms = [each for _ in range(4) for each in (nn.Linear(24, 24), nn.LayerNorm(24), nn.ReLU())]
        super().__init__(nn.Flatten(), nn.Linear(784, 24), *norms, nn.Linear(24, 10))


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
    verdict = compared_with_amp(backend, task, digits(0, task.samples), "bf16", steps=4)
    assert (verdict.word, verdict.cause) == (word, cause)
    assert "training (it draws other random numbers, such as masks of dropout)" in verdict.unchecked


class Coarse(Amp):
    """Gives the network inputs of 8 bits."""

    def forward(self, x, y):
        return super().forward(x.to(torch.float8_e4m3fn).float(), y)


@pytest.mark.slow
def test_other_inputs_are_named():
    task = Task(Wide, "cross_entropy", Sgd(lr=0.1), 32, 32 * 6)
    verdict = compared_with_amp(Coarse, task, digits(0, task.samples), "bf16", steps=2)
    assert (verdict.word, verdict.cause) == ("differs", "forward pass")
    assert re.match(r"what arrives at the network in the first step is \d\.\d % off", verdict.because)


class SumOfMeans(Amp):
    """Computes a batch in halves, says the mean of their losses, and differentiates the sum."""

    DIVIDED_BY = 1

    def forward(self, x, y):
        self.halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
        with torch.no_grad():
            return super().forward(x, y)

    def backward(self):
        for half in self.halves:
            super().forward(*half)
            self.loss = self.loss / self.DIVIDED_BY
            super().backward()


class MeanOfHalves(SumOfMeans):
    DIVIDED_BY = 2


class MeanOfMeans(MeanOfHalves):
    """Computes a batch in two parts of unequal size."""

    def forward(self, x, y):
        self.halves = list(zip(x.split([24, 8]), y.split([24, 8]), strict=True))
        with torch.no_grad():
            return Amp.forward(self, x, y)


class FirstHalf(MeanOfHalves):
    """Leaves half of the batch out."""

    def forward(self, x, y):
        loss = super().forward(x, y)
        self.halves[1:] = self.halves[:1]
        return loss


IN_PARTS = [
    (Wide, MeanOfHalves, "same", ""),
    (Normed, SumOfMeans, "differs", "gradient scaled"),
    *((network, MeanOfMeans, "differs", "loss") for network in (Normed, Wide)),
    *((network, FirstHalf, "differs", "") for network in (Normed, Wide)),
]


@pytest.mark.parametrize(
    ("network", "backend", "word", "cause"),
    [
        (Wide, SumOfMeans, "differs", "gradient scaled"),
        pytest.param(Normed, MeanOfHalves, "same", "", marks=pytest.mark.slow),
        *slow_rows(IN_PARTS),
    ],
)
def test_a_batch_in_parts_has_the_loss_of_the_batch(network, backend, word, cause):
    task = Task(network, "cross_entropy", Sgd(lr=0.1), 32, 32 * 6)
    verdict = compared_with_amp(backend, task, digits(0, task.samples), "bf16", steps=4)
    assert verdict.word == word, verdict.because
    assert not cause or verdict.cause == cause
