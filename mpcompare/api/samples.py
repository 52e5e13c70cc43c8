"""Data as people have them, as the four parts of a data set: a loader, a data set, tensors, arrays."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from mpcompare.errors import InputError, fault_of_call, in_full
from mpcompare.tasks.data.given import kind_of, tensor_of

EXPECTED = (
    "expected a DataLoader, a Dataset, tensors or arrays (x, y), the name of a data set, or a function of the seed "
    "that returns x_train, y_train, x_test, y_test"
)
LABELS = ("labels", "label", "targets", "target", "y")
HELD_OUT = 9  # one sample of so many is held out
Parts = tuple[Any, Any, Any, Any]


def parts_of(data: Any, wanted: int, model: Any, loss: Any) -> Parts:
    """Returns inputs and targets of training and held-out samples, each tensors or nests of them. Raises InputError
    where it is nothing of that kind.

    Args:
        data: two of what is accepted are the training and the held-out samples; of one the last part is held out.
        wanted: the number of samples after which a loader is not asked for more.
        model: the network or its class, whose arguments choose the inputs among the entries of a dict.
        loss: a batch that is a dict is input and target at once, unless the loss is a name that takes labels.
    """
    parts = data if isinstance(data, (tuple, list)) else ()
    if len(parts) == 4 and all(isinstance(each, Tensor | np.ndarray | Mapping) for each in parts):
        return tuple(_numbers(each, target=place % 2 == 1) for place, each in enumerate(parts))
    if len(parts) == 2 and all(map(_is_source, parts)):
        train, test = (_whole(each, wanted) for each in parts)
        return (*_pair(train, model, loss), *_pair(test, model, loss))
    whole = _whole(data, wanted)
    x, y = _pair(whole, model, loss)
    lengths = {len(leaf) for leaf in tree_flatten((x, y))[0] if isinstance(leaf, Tensor)}
    if len(lengths) > 1:
        if len(parts) > 2 and all(isinstance(each, Tensor | np.ndarray) for each in parts):
            expected = "expected 2 or 4, or several inputs and targets with as many samples each"
            raise InputError("data", f"{len(parts)} tensors", expected)
        said = " and ".join(map(str, sorted(lengths)))
        raise InputError("data", f"{said} samples", "expected as many inputs as targets")
    (rows,) = lengths
    held_out = max(rows // HELD_OUT, 1)
    if rows < 2:
        raise InputError("data", f"{rows} sample", "expected at least two, of which one is held out")
    x_train, y_train = tree_map(lambda t: t[: rows - held_out], (x, y))
    x_test, y_test = tree_map(lambda t: t[rows - held_out :], (x, y))
    return x_train, y_train, x_test, y_test


def batch_size_of(data: Any) -> int | None:
    """Returns the batch size of a loader; None of all else."""
    source = data[0] if isinstance(data, (tuple, list)) and data else data
    return source.batch_size if isinstance(source, DataLoader) else None


def _is_indexed(data: Any) -> bool:
    """Returns whether it is a data set with a length, or a list of samples."""
    if isinstance(data, (str, type, IterableDataset)):  # the last has a __getitem__ that raises
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _is_source(data: Any) -> bool:
    return isinstance(data, (DataLoader, Dataset))


def _whole(data: Any, wanted: int) -> Any:
    """Returns the samples as one batch."""
    if inspect.isclass(data):
        raise InputError("data", data.__name__, f"is a class: {EXPECTED}")
    if isinstance(data, Tensor | np.ndarray | Mapping) or (isinstance(data, tuple) and not any(map(_is_source, data))):
        return _numbers(data)
    if isinstance(data, list) and data and all(isinstance(each, Tensor | np.ndarray) for each in data):
        return _numbers(data)
    if isinstance(data, IterableDataset):
        expected = "is an IterableDataset: put it into a DataLoader with a batch size"
        raise InputError("data", type(data).__name__, expected)
    if _is_indexed(data):
        return _collated(data, wanted)
    if isinstance(data, Iterable):
        return _joined(_until(iter(data), wanted))
    raise InputError("data", type(data).__name__, EXPECTED)


def _collated(data: Any, wanted: int) -> Any:
    """Returns samples of a data set, drawn at random where it has more than are wanted: many are sorted by class."""
    if not len(data):
        raise InputError("data", type(data).__name__, "is empty")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:wanted]
    try:
        return _numbers(default_collate([data[int(row)] for row in order]))
    except (TypeError, RuntimeError, ValueError) as error:
        expected = f"its samples make no batch ({in_full(error)[:160]}): give a DataLoader, or an iterator of batches"
        raise InputError("data", type(data).__name__, expected) from error


def _until(batches: Iterator[Any], wanted: int) -> list[Any]:
    """Returns as many batches as hold the samples that are wanted."""
    found: list[Any] = []
    rows = 0
    for batch in islice(batches, wanted):
        found.append(_numbers(batch))
        rows += len(next((t for t in tree_flatten(found[-1])[0] if isinstance(t, Tensor)), ()))
        if rows >= wanted:
            break
    return found


def _joined(batches: list[Any]) -> Any:
    if not batches:
        raise InputError("data", "loader", "gives no batch")
    spec = tree_flatten(batches[0])[1]
    try:
        columns = zip(*(tree_flatten(batch)[0] for batch in batches), strict=True)
        return tree_unflatten([torch.cat(column) for column in columns], spec)
    except (RuntimeError, TypeError, ValueError) as error:
        expected = f"gives batches that do not fit each other ({in_full(error)[:160]}): pad all samples to one length"
        raise InputError("data", "loader", expected) from error


def _numbers(batch: Any, target: bool | None = None) -> Any:
    """Returns a batch as a nest of tensors, without what no network takes, such as names of files. ``target`` says
    whether it is a target; None of a whole batch: its labels are one, or the last of several tensors is."""
    if isinstance(batch, Mapping):
        return {
            key: _numbers(value, key in LABELS if target is None else target)
            for key, value in batch.items()
            if _holds_numbers(value)
        }
    if isinstance(batch, (tuple, list)):
        last = len(batch) - 1
        return tuple(
            _numbers(value, 0 < place == last if target is None else target) for place, value in enumerate(batch)
        )
    if not isinstance(batch, Tensor | np.ndarray):
        raise InputError("data", f"batch of {type(batch).__name__}", EXPECTED)
    tensor = tensor_of(batch, bool(target))
    if tensor is None:
        raise InputError("data", kind_of(batch), "expected a tensor or a numpy array of numbers")
    if not tensor.dim():
        raise InputError("data", f"{tensor.item()}", "is a single number: expected a tensor with a row for each sample")
    return tensor


def _holds_numbers(value: Any) -> bool:
    return not isinstance(value, str) and not (isinstance(value, list) and value and isinstance(value[0], str))


def _pair(batch: Any, model: Any, loss: Any) -> tuple[Any, Any]:
    """Returns inputs and targets. The only tensor of a batch is both, and of several the last is the target."""
    if not tree_leaves(batch):
        raise InputError("data", type(batch).__name__, "is empty: expected inputs and targets")
    if isinstance(batch, Tensor):
        return batch, batch
    if isinstance(batch, tuple):
        *inputs, y = batch
        return (batch[0], batch[0]) if not inputs else (inputs[0] if len(inputs) == 1 else tuple(inputs), y)
    if loss == "model":
        return batch, batch
    labels = next((name for name in LABELS if name in batch), None)
    taken = _arguments(model)
    x = {name: each for name, each in batch.items() if name in taken} if taken else dict(batch)
    if not x:
        expected = f"has {', '.join(batch)}, and the network takes {', '.join(taken or ())}"
        raise InputError("data", "batch", expected)
    if not isinstance(loss, str):
        return x, batch
    if labels is None:
        expected = f"has {', '.join(batch)}, and loss={loss} needs targets: expected one of {', '.join(LABELS)}"
        raise InputError("data", "batch", expected)
    return {name: each for name, each in x.items() if name != labels}, batch[labels]


def _arguments(model: Any) -> tuple[str, ...] | None:
    """Returns the names that a network's forward takes; None where it takes any, or they are not known."""
    cls = model if inspect.isclass(model) else type(model) if isinstance(model, nn.Module) else None
    if cls is None or not issubclass(cls, nn.Module):
        return None
    forward: Callable[..., Any] = cls.forward
    parameters = inspect.signature(forward).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return tuple(each.name for each in parameters)[1:]


def is_function(data: Any) -> bool:
    """Returns whether ``data`` is a function of the seed, and nothing that holds samples. Raises InputError where it is
    a function of something else."""
    if not callable(data) or inspect.isclass(data) or _is_source(data) or hasattr(data, "__getitem__"):
        return False
    if fault := fault_of_call(data, 0):
        name = getattr(data, "__name__", type(data).__name__)
        raise InputError("data", name, f"{fault}: expected a function of the seed")
    return True


def has_labels(data: Any) -> bool:
    """Returns whether samples are dicts with labels, of which a network makes its loss itself."""
    source: Any = data[0] if isinstance(data, (tuple, list)) and len(data) == 2 and _is_source(data[0]) else data
    source = source.dataset if isinstance(source, DataLoader) else source
    if not isinstance(source, Mapping) and _is_indexed(source) and len(source):
        source = source[0]
    return isinstance(source, Mapping) and "labels" in source
