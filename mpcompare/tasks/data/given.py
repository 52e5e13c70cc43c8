"""Data of a user's own function: tensors or numpy arrays, checked before anything is made of them or trained on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_map_with_path

from mpcompare.errors import InputError, fault_of_call, result_of
from mpcompare.tasks.batch import Batch, Tree, named
from mpcompare.tasks.data.dataset import PARTS, Dataset

LARGEST = torch.finfo(torch.float32).max ** 0.5  # 1.8e19: the square of a gradient, which optimizers keep, is not held


def load(function: Callable[[int], Any], seed: int) -> Dataset:
    """Returns the data set of a function of the seed. Raises InputError where the function does not take the seed
    alone, raises an error (the message says where), ends the program, or returns something else."""
    name = str(getattr(getattr(function, "func", function), "__name__", "function"))
    if fault := fault_of_call(function, seed):
        raise InputError("data._target_", name, f"expected a function that can be called with the seed ({fault})")
    return dataset_of(result_of("data._target_", name, function, seed), name)


def dataset_of(loaded: Any, name: str) -> Dataset:
    """Returns the data set that the function called ``name`` has returned as ``loaded``.

    numpy's fp64 becomes fp32, and targets become fp32 or int64, as torch's functions want them. Raises InputError
    where these are not four tensors or arrays, or they do not fit each other."""
    if isinstance(loaded, Dataset):
        parts, name, reason = [getattr(loaded, part) for part in PARTS], loaded.name, loaded.reason
    elif isinstance(loaded, (tuple, list)) and len(loaded) == 4:
        parts, reason = list(loaded), "asked for"
    else:
        expected = "expected a Dataset, or the tensors x_train, y_train, x_test, y_test"
        raise InputError("data._target_", name, expected)
    tensors = {part: batch_of(part, value, name) for part, value in zip(PARTS, parts, strict=True)}
    for x, y in (("x_train", "y_train"), ("x_test", "y_test")):
        (first, values), *others = [*named(x, tensors[x]), *named(y, tensors[y])]
        for other, its in others:
            if len(its) != len(values):
                lengths = f"{len(values)} samples in {first}, and {len(its)} in {other}"
                raise InputError("data._target_", name, f"has {lengths}: expected as many")
    for train, test in (("x_train", "x_test"), ("y_train", "y_test")):
        if (of_train := _sample(tensors[train])) != (of_test := _sample(tensors[test])):
            raise InputError("data._target_", name, f"{test} has samples {of_test}, and {train} {of_train}")
    return Dataset(name, reason, *tensors.values())


def batch_of(part: str, value: Any, name: str) -> Batch:
    """Returns the part of a data set as a tensor, or as a tree of them where it is a dict, a tuple or a list."""
    if not isinstance(value, (dict, tuple, list, Tree)):
        return _tensor(part, value, name)
    value = value.value if isinstance(value, Tree) else value
    tree = Tree(tree_map_with_path(lambda path, leaf: _tensor(part + keystr(path), leaf, name), value))
    if not tree.tensors:
        raise InputError("data._target_", name, f"{part} is an empty {type(value).__name__}: expected samples")
    return tree


def _tensor(part: str, value: Any, name: str) -> Tensor:
    tensor = tensor_of(value, part.startswith("y"))
    if tensor is None:
        found = kind_of(value)
        raise InputError("data._target_", name, f"{part} is a {found}: expected a tensor or a numpy array of numbers")
    if tensor.dim() == 0 or tensor.numel() == 0:
        shape = list(tensor.shape)
        raise InputError("data._target_", name, f"{part} has shape {shape}: expected samples, at least one")
    return tensor


def tensor_of(value: Any, target: bool) -> Tensor | None:
    """Returns numbers as a tensor on the CPU, those of targets and arrays in a dtype of torch's functions; None of all
    else."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        dtype = np.dtype(f"{value.dtype.kind}{min(value.dtype.itemsize, 8)}")  # in the byte order of the machine
        value = torch.from_numpy(np.require(value, dtype, ["C", "W"]))  # torch warns of arrays that nobody may write
        if value.dtype is torch.float64:
            value = value.float()
        elif target and value.dtype is torch.bool:
            value = value.long()
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex() or value.is_meta:
        return None
    if target and value.dtype is not torch.bool:  # torch's masks stay masks
        value = value.float() if value.is_floating_point() else value.long()
    return value.detach().cpu()


def kind_of(value: Any) -> str:
    """Returns the type and the dtype of what is no tensor of numbers."""
    return f"{type(value).__name__} {getattr(value, 'dtype', '')}".strip()


def _sample(batch: Batch) -> str:
    samples = (f"{where} {list(t.shape[1:])} {str(t.dtype).removeprefix('torch.')}" for where, t in named("", batch))
    return ", ".join(map(str.lstrip, samples))


def not_finite(dataset: Dataset) -> str:
    """Returns where the first number of the data stands that is NaN, infinite, or beyond ``LARGEST``; else nothing."""
    for part in PARTS:
        for name, values in named(part, getattr(dataset, part)):
            if values.is_floating_point():
                wrong = ~(values.float().abs() <= LARGEST)  # NaN is not below anything
                if count := int(wrong.sum()):
                    return _where(name, values, wrong, count)
    return ""


def refused(name: str, infinite: str) -> InputError:
    """Returns the error of a data set for which ``not_finite`` returns something."""
    expected = "expected finite numbers whose squares are finite"
    return InputError("data", name, f"{infinite}: {expected}; train.not_finite=true trains on it, without a verdict")


def _where(part: str, values: Tensor, wrong: Tensor, count: int) -> str:
    sample, *feature = (int(each) for each in wrong.nonzero()[0])
    value = float(values[(sample, *feature)])
    where = f", feature {feature[0] if len(feature) == 1 else tuple(feature)}" if feature else ""
    more = f", and {count - 1} more" if count > 1 else ""
    reason = f", whose square fp32 does not hold (at most {LARGEST:.2g})" if LARGEST < abs(value) < float("inf") else ""
    return f"{part}, sample {sample}{where} is {value:g}{reason}{more}"
