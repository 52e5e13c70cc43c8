"""What malloc does with freed memory in a fresh process, as a line of JSON: test_heap.py reads it."""

import json
import resource
import threading

import torch

from mpcompare.instruments import heap, meter

MB = 1 << 20


def faults(times: int) -> list[int]:
    """Page faults of a tensor of 64 MB that is filled and freed, again and again."""
    found = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(64 * MB // 4)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found


def with_survivors() -> list[torch.Tensor]:
    """Blocks that lie above a large one in the heap, which is freed."""
    large = torch.ones(256 * MB // 4)
    survivors = [torch.ones(250_000) for _ in range(20)]
    del large
    return survivors


def main() -> None:
    found = {"plain": faults(5)}
    with heap.kept():
        torch.ones(256 * MB // 4)  # room for more than one, for small blocks may take a little of it
        found["kept"] = faults(8)
    found["after"] = faults(5)
    try:
        with heap.kept():
            raise ZeroDivisionError
    except ZeroDivisionError:
        found["after an exception"] = faults(5)
    before = meter.rss_bytes() or 0
    with heap.kept():
        survivors = with_survivors()
        found["resident within"] = (meter.rss_bytes() or 0) - before
    found["resident after"] = (meter.rss_bytes() or 0) - before
    libc = heap._glibc()
    assert libc is not None
    found["free in the heap"] = libc.mallinfo2().fordblks
    found["after survivors"] = faults(20)
    found["heap"] = []
    for _ in range(12):
        with heap.kept():
            survivors = with_survivors()
        found["heap"].append(libc.mallinfo2().arena)
    del survivors
    with heap.kept():  # the arena of a thread has no room for such a block, and cannot map one then
        threads = [threading.Thread(target=faults, args=(5,)) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
