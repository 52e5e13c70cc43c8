"""Prints what malloc does with freed memory in a fresh process, a line of JSON that test_heap.py reads."""

import json
import resource
import threading
from typing import Any

import torch

from mpcompare.instruments import heap, meter

MB = 1 << 20


def faults(times: int) -> list[int]:
    """Returns the page faults of a tensor of 64 MB that is filled and freed, again and again."""
    counts = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(64 * MB // 4)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts


def with_survivors() -> list[torch.Tensor]:
    """Returns small blocks that lie in the heap above a large one that is freed."""
    large = torch.ones(256 * MB // 4)
    survivors = [torch.ones(250_000) for _ in range(20)]
    del large
    return survivors


def main() -> None:
    measured: dict[str, Any] = {"plain": faults(2)}
    with heap.kept():
        torch.ones(256 * MB // 4)  # room for more than one, for small blocks may take a little of it
        measured["kept"] = faults(3)
    measured["after"] = faults(2)
    try:
        with heap.kept():
            raise ZeroDivisionError
    except ZeroDivisionError:
        measured["after an exception"] = faults(2)
    before = meter.rss_bytes() or 0
    with heap.kept():
        survivors = with_survivors()
        measured["resident within"] = (meter.rss_bytes() or 0) - before
    measured["resident after"] = (meter.rss_bytes() or 0) - before
    libc = heap._glibc()
    assert libc is not None
    measured["free in the heap"] = libc.mallinfo2().fordblks
    measured["after survivors"] = faults(3)
    measured["heap"] = []
    for _ in range(7):
        with heap.kept():
            survivors = with_survivors()
        measured["heap"].append(libc.mallinfo2().arena)
    del survivors
    with heap.kept():  # the arena of a thread has no room for such a block, and cannot map one then
        threads = [threading.Thread(target=faults, args=(5,)) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
