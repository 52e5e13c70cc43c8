"""Data of a user's own function: tensors or numpy arrays, checked before anything is made of them."""

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpcompare.errors import InputError
from mpcompare.tasks.data.dataset import Dataset

PARTS = ("x_train", "y_train", "x_test", "y_test")


def called(function: Callable[[int], Any], seed: int, name: str) -> Any:
    """Returns what a function of the seed returns.

    Raises:
        InputError: it raises, or ends the program; the message says where.
    """
    try:
        return function(seed)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        ended = isinstance(error, SystemExit)
        what = f"calls sys.exit({error})" if ended else f"raises {type(error).__name__}: {error}"
        raise InputError("data._target_", name, f"{what} ({at.filename}, line {at.lineno})") from error


def dataset_of(loaded: Any, name: str) -> Dataset:
    """Returns the data set of what the function called ``name`` has returned.

    numpy's fp64 becomes fp32, and its integers as targets int64, as torch's functions want them.

    Raises:
        InputError: these are not four tensors or arrays, or they do not fit each other.
    """
    if isinstance(loaded, Dataset):
        parts, name, reason = [getattr(loaded, part) for part in PARTS], loaded.name, loaded.reason
    elif isinstance(loaded, (tuple, list)) and len(loaded) == 4:
        parts, reason = list(loaded), "asked for"
    else:
        expected = "expected a Dataset, or the tensors x_train, y_train, x_test, y_test"
        raise InputError("data._target_", name, expected)
    tensors = {part: _tensor(part, value, name) for part, value in zip(PARTS, parts, strict=True)}
    for x, y in (("x_train", "y_train"), ("x_test", "y_test")):
        if len(tensors[x]) != len(tensors[y]):
            lengths = f"{len(tensors[x])} samples in {x}, and {len(tensors[y])} in {y}"
            raise InputError("data._target_", name, f"has {lengths}: expected as many")
    for train, test in (("x_train", "x_test"), ("y_train", "y_test")):
        if (of_train := _sample(tensors[train])) != (of_test := _sample(tensors[test])):
            raise InputError("data._target_", name, f"{test} has samples {of_test}, and {train} {of_train}")
    return Dataset(name, reason, *tensors.values())


def _tensor(part: str, value: Any, name: str) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("=")))
        if value.dtype is torch.float64:
            value = value.float()
        elif part.startswith("y") and not value.is_floating_point():
            value = value.long()
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex() or value.is_meta:
        found = f"{type(value).__name__} {getattr(value, 'dtype', '')}".strip()
        raise InputError("data._target_", name, f"{part} is a {found}: expected a tensor or a numpy array of numbers")
    if value.dim() == 0 or value.numel() == 0:
        raise InputError("data._target_", name, f"{part} has shape {list(value.shape)}: expected samples, at least one")
    return value.detach().cpu()


def _sample(tensor: Tensor) -> str:
    return f"{list(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"
