from itertools import islice

import torch

from mpcompare.tasks.data import batches, drawn_batches
from mpcompare.tasks.data.generated import synthetic


def test_batches_are_whole_in_order_and_repeat():
    dataset = synthetic(0, 10, 20, 5, "cross_entropy")
    stream = list(islice(batches(dataset, 4), 5))
    starts = [0, 4, 0, 4, 0]
    for (x, y), start in zip(stream, starts, strict=True):
        assert torch.equal(x, dataset.x_train[start : start + 4])
        assert torch.equal(y, dataset.y_train[start : start + 4])
        assert x.untyped_storage().data_ptr() == dataset.x_train.untyped_storage().data_ptr()  # a view: no copy


def test_batches_are_drawn_by_their_seed():
    dataset = synthetic(0, 40, 20, 5, "cross_entropy")

    def numbers(seed):
        return [
            next(n for n in range(10) if torch.equal(x, dataset.x_train[4 * n : 4 * n + 4]))
            for x, _ in islice(drawn_batches(dataset, 4, seed), 60)
        ]

    drawn = numbers(1)
    assert drawn == numbers(1) != numbers(2)
    assert set(drawn) == set(range(10))
