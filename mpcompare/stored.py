"""Tensors by name. The tensors that are too many for the memory lie in a file and are read one by one.

The examination keeps the weights before a step, and its gradients. Each is as large as the network in fp32, and only
one tensor of it is looked at at a time.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import IO, NamedTuple

import torch
from torch import Tensor

LARGE = 1 << 25  # bytes that stay in memory


class _Place(NamedTuple):
    """The place of a tensor in the file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    bytes: int


class Stored(MutableMapping[str, Tensor]):
    """Copies of tensors, row by row.

    Tensors after the first ``LARGE`` bytes lie in a file that has no name. They stay in memory where they are on
    another device than the CPU, or where no file can be written.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self._kept: dict[str, Tensor | _Place] = {}
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self.update(tensors or {})

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        before = self._kept.get(name)
        if not isinstance(before, Tensor):
            self._bytes += tensor.nbytes
            if self._bytes > LARGE and tensor.device.type == "cpu":
                with suppress(OSError):
                    self._kept[name] = self._written(tensor.detach().contiguous(), before)
                    return
        self._kept[name] = tensor.detach().clone(memory_format=torch.contiguous_format)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor that lies in the file is a new copy each time."""
        kept = self._kept[name]
        return kept if isinstance(kept, Tensor) else self._read(kept)

    def __delitem__(self, name: str) -> None:
        del self._kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def _written(self, tensor: Tensor, before: _Place | None) -> _Place:
        """Writes a tensor where another one lay ``before``, if that was as large, and returns its place."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="mpcompare-")  # noqa: SIM115 (it is gone with this)
        end = os.fstat(self._file.fileno()).st_size
        offset = before.offset if before and before.bytes == tensor.nbytes else -(-end // 64) * 64
        write_at(self._file, tensor, offset)
        return _Place(offset, tensor.shape, tensor.dtype, tensor.nbytes)

    def _read(self, place: _Place) -> Tensor:
        assert self._file is not None
        tensor, offset = torch.empty(place.shape, dtype=place.dtype), place.offset
        left = _bytes_of(tensor)
        while left:
            read = os.preadv(self._file.fileno(), [left], offset)
            left, offset = left[read:], offset + read
        return tensor


def write_at(file: IO[bytes], tensor: Tensor, offset: int) -> None:
    """Writes a contiguous tensor to a place in a file."""
    left = _bytes_of(tensor)
    while left:  # one call writes 2 GiB at most
        written = os.pwrite(file.fileno(), left, offset)
        left, offset = left[written:], offset + written


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
