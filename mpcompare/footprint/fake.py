"""Networks without data: parameters and buffers that have shapes, dtypes and a device, and take no memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from mpcompare.footprint.kernels import call_on_zeros

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
