from itertools import islice

import torch

from mpcompare.tasks.data import batches
from mpcompare.tasks.data.generated import synthetic


def test_batches_are_whole_in_order_and_repeat():
    dataset = synthetic(0, 10, 20, 5, "cross_entropy")
    stream = list(islice(batches(dataset, 4), 5))
    starts = [0, 4, 0, 4, 0]
    for (x, y), start in zip(stream, starts, strict=True):
        assert torch.equal(x, dataset.x_train[start : start + 4])
        assert torch.equal(y, dataset.y_train[start : start + 4])
        assert x.untyped_storage().data_ptr() == dataset.x_train.untyped_storage().data_ptr()  # a view: no copy
