"""The memory inside of kernels, measured: each kernel is called once on tensors of zeros, of the shapes at hand.

torch's shape functions know the results of an operator, and not the memory that its kernel takes for itself while it
runs: a copy in another layout, the packed operands of a product. That depends on the library and on the processor, so
nothing but a call tells.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_map

from mpcompare.instruments import meter

CPU = torch.device("cpu")


class MeasuredKernels:
    """Calls each kernel once for each combination of shapes, strides, dtypes and other arguments."""

    def __init__(self) -> None:
        self._inside: dict[Any, int] = {}

    def inside(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result_bytes: int) -> int:
        """Returns the most bytes that one call holds beside ``result_bytes`` of new results."""
        if func.is_view:
            return 0
        leaves, spec = tree_flatten((list(args), dict(kwargs)))
        key = func, str(spec), tuple(map(_key, leaves))
        if key not in self._inside:
            self._inside[key] = max(_peak(func, args, kwargs) - result_bytes, 0)
        return self._inside[key]


def call_on_zeros(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of the operator itself, on CPU tensors of zeros in the place of the tensors.

    Gradients stay enabled if they are: an LSTM keeps its workspace only then.
    """
    with unset_fake_temporarily():
        args, kwargs = tree_map(_zeros, (args, kwargs))
        return func(*args, **kwargs)


def _peak(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns the most bytes that a call on zeros allocates; the zeros are there before.

    0 where the kernel refuses them: torch's shape function of batch norm gives its statistics another dtype than the
    kernel does, which then refuses them in backward.
    """
    with unset_fake_temporarily():
        args, kwargs = tree_map(_zeros, (args, kwargs))
        try:
            return meter.peak_memory(CPU, lambda: func(*args, **kwargs)).bytes
        except RuntimeError:
            return 0


def _zeros(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU).zero_()


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return type(leaf), str(leaf)
