"""Copies of tensors in a file without a name, which is mapped into memory: the system may write them out.

A watched step keeps what each layer was given and returned until it is compared. That is several times as large as the
training itself. So it must not lie in memory that only swapping frees, nor in memory of a GPU: only what is compared
next is brought back to the GPU. The copies are written to the file, and not to the map: a map takes a page fault for
each of its pages, and a copy takes twice as long.
"""

import copy
import mmap
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import IO, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mpcompare.stored import write_at
from mpcompare.verdict.examine.numerics import numbers, same_bits, spread
from mpcompare.verdict.examine.unseen import Unseen

SMALL = 1 << 16  # bytes of a tensor that is copied in memory
PIECE = 1 << 26  # bytes by which the file grows
T = TypeVar("T")


def on_devices(value: Any, devices: Mapping[Tensor, torch.device], known: dict[int, tuple[Any, Any]]) -> Any:
    """Returns a value of ours with the tensors within it on these devices. Other tensors stay where they are.

    Args:
        known: by ``id`` the values that were met before, and what stands for each.
    """
    if id(value) in known:
        return known[id(value)][1]
    made = value
    if isinstance(value, Tensor):
        made = value.to(devices[value]) if value in devices else value
    elif isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: on_devices(each, devices, known) for key, each in value.items()})
    elif type(value) in (list, tuple):
        made = type(value)(on_devices(each, devices, known) for each in value)
    elif is_dataclass(value) and type(value).__module__.startswith("mpcompare."):
        made = copy.copy(value)
        for each in fields(value):
            object.__setattr__(made, each.name, on_devices(getattr(value, each.name), devices, known))
    known[id(value)] = value, made
    return made


class Spool:
    """Makes copies. Memory that copies share is freed with the last of them.

    A layer is often given what the layer before returned. A tensor that still has the bits of its last copy gets it.
    """

    def __init__(self) -> None:
        self._devices: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by copy on the CPU, the device of its tensor
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self._start = self._used = self._size = 0
        self._free: list[int] = []  # the beginnings of the pieces whose copies are all gone
        self._last: dict[tuple[int, torch.Size, tuple[int, ...]], weakref.ref[Tensor]] = {}  # by place and layout

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy, row by row if it lies in the file; :meth:`back` brings it to the device of the tensor."""
        with torch.no_grad(), Unseen():
            tensor = tensor.detach().resolve_conj().resolve_neg()
            if tensor.layout is not torch.strided or tensor.nbytes < SMALL:
                return tensor.clone()
            place = tensor.data_ptr(), tensor.shape, tensor.stride()
            copied = self._last[place]() if place in self._last else None
            if copied is None or not same_bits(tensor, copied):
                copied = self._write(tensor.cpu().contiguous())
                self._last[place] = weakref.ref(copied)
            if copied.device != tensor.device:
                self._devices[copied] = tensor.device
            return copied

    def some(self, tensor: Tensor, times: float = 1.0) -> Tensor:
        """Returns a copy of some elements, multiplied by a number, in one row on the CPU."""
        with torch.no_grad(), Unseen():
            row = spread(numbers(tensor)).cpu()
            row = row if times == 1 else row * times  # whole numbers stay so, such as what an optimizer keeps in 8 bits
            return row if row.nbytes < SMALL else self._write(row)

    def back(self, value: T) -> T:
        """Returns a value of ours, such as a sum of gradients, with the copies within it on the devices of their
        tensors. Where all these are on the CPU, it is the value itself."""
        return on_devices(value, self._devices, {}) if self._devices else value

    def _write(self, tensor: Tensor) -> Tensor:
        wanted = tensor.nbytes
        if self._map is None or self._used + wanted > len(self._map):
            self._grow(max(PIECE, -(-wanted // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY))
        assert self._map is not None
        assert self._file is not None
        write_at(self._file, tensor, self._start + self._used)
        copied = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += -(-wanted // 64) * 64
        return copied.view(tensor.shape)

    def _grow(self, size: int) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="mpcompare-")  # noqa: SIM115 (it is gone with the copies)
        if size > PIECE or not self._free:
            self._free.append(self._size)
            self._size += size
            self._file.truncate(self._size)
        self._start, self._used = self._free.pop(), 0
        self._map = mmap.mmap(self._file.fileno(), size, offset=self._start)
        if size == PIECE:
            weakref.finalize(self._map, self._free.append, self._start)
