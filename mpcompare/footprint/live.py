"""The live storages: every storage that operators make, from its first tensor to its last."""

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpcompare.footprint.fake import MeasuredKernels


@dataclass(eq=False)
class Allocation:
    """A storage, or the memory that a kernel holds while it runs."""

    bytes: int  # its size
    cast_of_param: bool = False  # whether it is a parameter, cast to another dtype
    inside: bool = False  # whether it is memory inside a kernel, and no tensor
    phase: str = ""  # the phase of the step in which it was made; empty before :meth:`Live.end_phase`


@dataclass(eq=False)
class Live(TorchDispatchMode):
    """A mode that sees every operator below autograd and autocast.

    A storage counts from the operator that returned its first tensor until it is freed, as with an allocator that
    neither rounds nor keeps. Temporaries that a kernel allocates by itself are seen only with ``kernels``.
    """

    kernels: MeasuredKernels | None = None  # measures the memory inside of kernels; None: it is not counted
    # each allocation, and each free as a negative number of bytes, in their order
    changes: list[tuple[int, Allocation]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._known: dict[int, Allocation | None] = {}  # by address of the storage; None: it is not counted
        self._params: set[int] = set()
        self._without_phase = 0

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Counts nothing for these tensors, which were there before."""
        for tensor in tensors:
            self._known.setdefault(_address(tensor), None)

    def name_params(self, params: Iterable[Tensor]) -> None:
        """Names the parameters, whose casts are told from other tensors from now on."""
        self._params |= {_address(p) for p in params}

    def allocation(self, tensor: Tensor) -> Allocation | None:
        """Returns the allocation of a tensor's storage; None where it was left out."""
        return self._known.get(_address(tensor))

    def end_phase(self, phase: str) -> None:
        """Gives ``phase`` to the allocations since the end of the last one."""
        for _, allocation in itertools.islice(self.changes, self._without_phase, None):
            allocation.phase = allocation.phase or phase
        self._without_phase = len(self.changes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        cast = func is torch.ops.aten._to_copy.default and _address(args[0]) in self._params
        result = func(*args, **kwargs)
        new = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        before = len(self.changes)
        for tensor in new:
            self._add(tensor, Allocation(tensor.untyped_storage().nbytes(), cast_of_param=cast))
        if self.kernels is not None:
            made = sum(size for size, _ in self.changes[before:])
            if size := self.kernels.inside(func, args, kwargs, made):
                held = Allocation(size, inside=True)
                self.changes += [(size, held), (-size, held)]
        return result

    def _add(self, tensor: Tensor, allocation: Allocation) -> None:
        storage, address = tensor.untyped_storage(), _address(tensor)
        if address not in self._known:
            self._known[address] = allocation
            self.changes.append((allocation.bytes, allocation))
            weakref.finalize(storage, self._free, address, allocation).atexit = False

    def _free(self, address: int, allocation: Allocation) -> None:
        self._params.discard(address)
        if self._known.get(address) is allocation:
            del self._known[address]
        self.changes.append((-allocation.bytes, allocation))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
