"""Networks without data: parameters and buffers that have shapes, dtypes and a device, and take no memory.

torch's shape functions know the results of an operator, and not the memory that its kernel takes for itself while it
runs: a copy in another layout, the packed operands of a product. This memory depends on the library and on the
processor. So kernels are measured: each is called once on tensors of zeros, of the shapes at hand.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_map

from mpcompare.instruments import meter

CPU = torch.device("cpu")
# Operators whose results hold more on a CPU than torch's shape functions say.
LARGER = (
    torch.ops.aten.mkldnn_rnn_layer.default,  # an LSTM's workspace for backward
    torch.ops.aten.mse_loss.default,  # the scalar keeps the storage of its terms
)


class Fake(FakeTensorMode):
    """torch's mode for tensors without data. A copy of a module in it holds tensors of the same mode.

    The operators in ``LARGER`` are called on zeros, and the storages of their results get the sizes of those calls.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "Fake":
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func not in LARGER:
            return result
        real = call_on_zeros(func, args, kwargs or {})
        with self:
            return tree_map(_with_storage_of, real)


def _with_storage_of(real: Any) -> Any:
    """Returns a tensor of the current mode with the shape of ``real`` and a storage of its size; None of None."""
    if real is None:
        return None
    elements = real.untyped_storage().nbytes() // real.itemsize
    return torch.empty(elements, dtype=real.dtype).as_strided(real.shape, real.stride(), real.storage_offset())


def make_module(make: Callable[[], nn.Module]) -> nn.Module:
    """Returns a module on the meta device, where it takes neither memory nor time; one that cannot be made there, on
    the CPU."""
    try:
        with torch.device("meta"):
            return make()
    except Exception:  # its initial weights are computed from numbers; any other reason is raised again
        return make()


def without_data(model: nn.Module, mode: Fake) -> nn.Module:
    """Replaces, in place, the parameters and buffers by tensors of ``mode`` on the CPU. Tied ones stay tied."""
    replaced: dict[int, Tensor] = {}

    def empty(tensor: Tensor) -> Tensor:
        if id(tensor) not in replaced:
            with mode:
                new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                is_param = isinstance(tensor, nn.Parameter)
                replaced[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_param else new
        return replaced[id(tensor)]

    for module in model.modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in tensors:
            setattr(module, name, empty(tensor))
    return model


class MeasuredKernels:
    """Calls each kernel once for each combination of shapes, strides, dtypes and other arguments."""

    def __init__(self) -> None:
        self._inside: dict[Any, int] = {}

    def inside(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result_bytes: int) -> int:
        """Returns the most bytes that one call holds in addition to ``result_bytes`` of new results."""
        if func.is_view:
            return 0
        leaves, spec = tree_flatten((list(args), dict(kwargs)))
        key = func, str(spec), tuple(map(_key, leaves))
        if key not in self._inside:
            try:
                self._inside[key] = max(call_on_zeros(partial(_peak, func), args, kwargs) - result_bytes, 0)
            except RuntimeError:
                # torch's shape function of batch norm gives its statistics another dtype than the kernel does, and the
                # kernel refuses that dtype in backward.
                self._inside[key] = 0
        return self._inside[key]


def call_on_zeros(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of a function itself, on CPU tensors of zeros in the place of the tensors.

    Gradients stay enabled if they are: an LSTM keeps its workspace only then.
    """
    with unset_fake_temporarily():
        args, kwargs = tree_map(_zeros, (args, kwargs))
        return func(*args, **kwargs)


def _peak(func: Any, *args: Any, **kwargs: Any) -> int:
    return meter.peak_memory(CPU, lambda: func(*args, **kwargs)).bytes


def _zeros(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU).zero_()


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return type(leaf), str(leaf)
