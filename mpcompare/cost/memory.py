"""The analytic memory model: which tensors must be live at the peak of a step, by kind, name and size in bytes.

A step is replayed as the sequence of its allocations and frees; the peak is the fullest moment. It counts what the
framework's allocator hands out. What a matrix product computes in is its library's choice, so it is measured: on a GPU
cuBLAS has it from the same allocator, and it joins the model as the kind "workspace" (train.py); packing buffers of a
CPU GEMM lie outside and stand beside it.
"""

from mpcompare.contract import MemoryModel

# In the order of a figure: what a step finds, what it keeps for the next, what comes and goes in it.
TENSOR_KINDS = (
    "inputs",
    "master params",
    "optimizer state",
    "compute copies",  # 16-bit weights that a backend keeps for itself
    "cast cache",  # 16-bit weights that autocast keeps
    "activations",  # the 16-bit copy of the inputs among them
    "gradients",  # of activations and of weights
    "workspace",  # of cuBLAS, on a GPU
)


def allocated_bytes(model: MemoryModel) -> int:
    """What the allocator must have handed out at the peak."""
    return sum(sum(tensors.values()) for tensors in model.values())


class Ledger:
    """Live tensors, each under a name of its own; :attr:`peak` is the breakdown of the fullest moment so far."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[str, int]] = {}
        self._fullest: dict[str, tuple[str, int]] = {}

    def alloc(self, kind: str, name: str, elements: int, itemsize: int) -> None:
        self._live[name] = (kind, elements * itemsize)
        if _total(self._live) > _total(self._fullest):
            self._fullest = dict(self._live)

    def free(self, *names: str) -> None:
        for name in names:
            self._live.pop(name, None)

    @property
    def peak(self) -> MemoryModel:
        by_kind = {kind: {n: size for n, (k, size) in self._fullest.items() if k == kind} for kind in TENSOR_KINDS}
        return {kind: tensors for kind, tensors in by_kind.items() if tensors}


def _total(tensors: dict[str, tuple[str, int]]) -> int:
    return sum(size for _, size in tensors.values())
