"""Copies of tensors in a file without a name, which is mapped into memory: the system may write them out.

A watched step keeps what each layer was given and returned until the block ends. That is several times as large as the
training itself, so it must not be memory that only swapping frees.
"""

import mmap
import tempfile
from typing import IO

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

SMALL = 1 << 16  # bytes of a tensor that is copied in memory
PIECE = 1 << 26  # bytes by which the file grows


class Spool:
    """Makes copies. What they share is freed with the last one of them."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self._used = self._size = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy, row by row if it lies in the file."""
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            tensor = tensor.detach()
            if tensor.nbytes < SMALL or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                return tensor.clone()
            copied = self._take(tensor.nbytes, tensor.dtype, tensor.numel()).view(tensor.shape)
            return copied.copy_(tensor)

    def _take(self, wanted: int, dtype: torch.dtype, count: int) -> Tensor:
        if self._map is None or self._used + wanted > len(self._map):
            self._grow(max(PIECE, -(-wanted // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY))
        assert self._map is not None
        taken = torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._used)
        self._used += -(-wanted // 64) * 64
        return taken

    def _grow(self, size: int) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="mpcompare-")  # noqa: SIM115 (it is gone with the copies)
        self._file.truncate(self._size + size)
        self._map, self._used = mmap.mmap(self._file.fileno(), size, offset=self._size), 0
        self._size += size
