"""Numbers of the data that no training in fp32 survives: the first of them by sample and feature."""

import torch
from torch import Tensor

from mpcompare.tasks.batch import named
from mpcompare.tasks.data.dataset import Dataset
from mpcompare.tasks.data.given import PARTS

LARGEST = torch.finfo(torch.float32).max ** 0.5  # 1.8e19: the square of a gradient, which optimizers keep, is not held


def not_finite(dataset: Dataset) -> str:
    """Returns where the first number of the data stands that is NaN, infinite, or beyond ``LARGEST``; else nothing."""
    for part in PARTS:
        for name, values in named(part, getattr(dataset, part)):
            if words := _first(name, values):
                return words
    return ""


def _first(part: str, values: Tensor) -> str:
    if not values.is_floating_point():
        return ""
    wrong = ~(values.abs() <= LARGEST)  # NaN is not below anything
    count = int(wrong.sum())
    if not count:
        return ""
    sample, *feature = (int(each) for each in wrong.nonzero()[0])
    value = float(values[(sample, *feature)])
    where = f", feature {feature[0] if len(feature) == 1 else tuple(feature)}" if feature else ""
    more = f", and {count - 1} more" if count > 1 else ""
    reason = f", whose square fp32 does not hold (at most {LARGEST:.2g})" if LARGEST < abs(value) < float("inf") else ""
    return f"{part}, sample {sample}{where} is {value:g}{reason}{more}"
