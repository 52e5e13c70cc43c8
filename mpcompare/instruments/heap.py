"""Freed memory is kept for reuse while nothing is timed.

glibc maps a large block when it is asked for, and unmaps it when it is freed: each page of each tensor is a page fault,
a quarter of a second for every GB. Steps are trained and timed like that. Examining them need not wait for it.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torch import Tensor

from mpcompare.instruments import memory_limit, meter

# malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
MMAPS = 1 << 16  # glibc's DEFAULT_MMAP_MAX
LARGE = 32 << 20  # glibc maps blocks from its threshold on, which grows with what is freed up to this
HOLE = 1 << 20  # a free block of so many bytes or more is a hole
SET_BY_USER = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # with these malloc is set up, and stays as it is

HUGE = 1 << 21  # bytes of a page
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MADV_DONTNEED, MADV_HUGEPAGE, MADV_NOHUGEPAGE = 4, 14, 15  # mman.h
LARGE_TENSOR = 1 << 20  # bytes

_filled: list[int] = []  # addresses of the blocks that lie in holes
_reserved: list[int] = []  # the address from which on the heap may have large pages


class _Mallinfo2(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


@contextmanager
def kept() -> Iterator[None]:
    """Lets malloc keep freed memory for the next blocks that are asked for, until the end of the block.

    At the end memory goes back to the system, and malloc works as in a process that has freed large blocks.

    A small block that outlives this holds the heap above all that was freed below it. A tensor of a later step would
    lie in such a hole, whose pages stay mapped. It would be up to a third faster than the tensor of an entrant without
    holes. So the holes are filled, with blocks whose pages nobody touches.

    Without glibc 2.33 or later, or where the user has set malloc up, memory only goes back at the end.
    """
    libc = _to_set_up()
    if libc:
        _keep(libc)
    try:
        yield
    finally:
        meter.release()
        if libc:
            _as_before(libc)
            _fill_holes(libc)


def fill_holes() -> None:
    """Fills the holes that were left since :func:`kept` ended: blocks that were made within it and freed after it."""
    meter.release()
    if _filled and (libc := _to_set_up()):
        _fill_holes(libc)


def trim() -> None:
    """Gives freed memory back to the system within :func:`kept`, too: the next tensors have other sizes, and would lie
    next to the holes that the last ones left."""
    if libc := _glibc():
        libc.malloc_trim(0)
        if _reserved:
            _reserve(libc)


def forget(mapped: Tensor) -> None:
    """Lets the system take back the pages of a large tensor that is mapped from a file and that nobody wrote into; they
    are read again when somebody asks for its numbers. Any other tensor stays as it is."""
    size = mapped.untyped_storage().nbytes()
    if size < LARGE_TENSOR or mapped.device.type != "cpu" or not (libc := _glibc()):
        return
    start = mapped.untyped_storage().data_ptr()
    if _lies_in_file(start, start + size):
        page = start - start % mmap.PAGESIZE
        libc.madvise(page, start + size - page, MADV_DONTNEED)


def _lies_in_file(start: int, end: int) -> bool:
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in maps:
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= start and end <= last:
            return inode != "0"
    return False


def _keep(libc: ctypes.CDLL) -> None:
    while _filled:
        libc.free(_filled.pop())
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
    if HUGE_PAGES.exists() and "[madvise]" in HUGE_PAGES.read_text():
        _reserve(libc)


def _reserve(libc: ctypes.CDLL) -> None:
    """Grows the heap by half of the memory, in pages of 2 MB, none of which is touched: a tensor takes one page fault
    then in place of 512. The other half is left to what does not ask malloc, such as files that are mapped."""
    size = memory_limit.available_bytes() // 2
    if block := libc.malloc(size):
        start = -(-block // HUGE) * HUGE
        libc.madvise(start, size - HUGE, MADV_HUGEPAGE)
        libc.free(block)
        _reserved[:] = [min(start, *_reserved)] if _reserved else [start]


def _as_before(libc: ctypes.CDLL) -> None:
    """Gives small pages back to the rest of the reserve: timed steps have small pages everywhere."""
    if _reserved:
        start, end = _reserved.pop(), libc.sbrk(0)
        if end > start:
            libc.madvise(start, end - start, MADV_NOHUGEPAGE)


def _fill_holes(libc: ctypes.CDLL) -> None:
    libc.mallopt(M_MMAP_MAX, MMAPS)
    libc.mallopt(M_MMAP_THRESHOLD, HOLE)  # what fits into no hole is mapped
    size = 1 << libc.mallinfo2().fordblks.bit_length()  # more than is free in all
    while size >= HOLE:
        mapped = libc.mallinfo2().hblks
        block = libc.malloc(size)
        if block and libc.mallinfo2().hblks == mapped:
            _filled.append(block)
        else:
            libc.free(block)
            size //= 2
    libc.mallopt(M_MMAP_THRESHOLD, LARGE)
    libc.mallopt(M_TRIM_THRESHOLD, 2 * LARGE)


def _to_set_up() -> ctypes.CDLL | None:
    return None if any(name.startswith(SET_BY_USER) for name in os.environ) else _glibc()


@cache
def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    if not hasattr(libc, "mallinfo2"):
        return None
    assert libc is not None
    libc.mallinfo2.restype = _Mallinfo2
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.malloc_trim.argtypes = (ctypes.c_size_t,)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    return libc
