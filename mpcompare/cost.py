"""The cost of a step on paper: the flops of a step of any module, and the kit of an analytic memory model.

A memory model has the tensors that are live at the peak of a step, by kind, name and bytes. It replays a step as the
sequence of its allocations and frees, and the peak is the fullest moment. It counts what the framework's allocator
hands out. The library of a matrix product chooses the room in which it computes, so this workspace is measured. On a
GPU cuBLAS takes it from the same allocator, and it joins the model as the kind "workspace" (entrant/memory.py). The
packing buffers of a CPU GEMM lie outside of the allocator and of the model. The models themselves belong to the
backends (backends/memory_models).
"""

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mpcompare.contract import MemoryModel
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.losses import Loss

# In the order of a figure: tensors that a step gets, tensors that it keeps for the next, tensors that come and go.
TENSOR_KINDS = (
    "inputs",
    "master params",
    "optimizer state",
    "compute copies",  # 16-bit weights that a backend keeps for itself
    "cast cache",  # 16-bit weights that autocast keeps
    "activations",  # the 16-bit copy of the inputs among them
    "gradients",  # of activations and of weights
    "workspace",  # on a GPU, the workspace of cuBLAS
)


def step_flops(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> int | None:
    """Returns the floating point operations of the matrix products (linear, convolution, recurrence, attention) in
    forward and backward of a batch, or None where the module cannot run on tensors without memory. A product of M x K
    by K x N has 2 M N K."""
    try:
        network = copy_of(model).to("meta")
        with FlopCounterMode(display=False) as counter:
            loss_fn(network(x.to("meta")), y.to("meta")).backward()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return counter.get_total_flops()


def allocated_bytes(model: MemoryModel) -> int:
    """Returns the sum over all tensors of a model: the bytes that the allocator hands out at the peak."""
    return sum(sum(tensors.values()) for tensors in model.values())


class Ledger:
    """The live tensors of a step that is replayed, each under a name of its own."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[str, int]] = {}
        self._fullest: dict[str, tuple[str, int]] = {}

    def alloc(self, kind: str, name: str, elements: int, itemsize: int) -> None:
        """Adds a tensor of so many elements, each of ``itemsize`` bytes."""
        self._live[name] = (kind, elements * itemsize)
        if _total(self._live) > _total(self._fullest):
            self._fullest = dict(self._live)

    def free(self, *names: str) -> None:
        """Drops tensors; a name that is not live is passed over."""
        for name in names:
            self._live.pop(name, None)

    @property
    def peak(self) -> MemoryModel:
        """The fullest moment so far, ``{kind: {name: bytes}}``, the kinds in the order of ``TENSOR_KINDS``."""
        by_kind = {kind: {n: size for n, (k, size) in self._fullest.items() if k == kind} for kind in TENSOR_KINDS}
        return {kind: tensors for kind, tensors in by_kind.items() if tensors}


def _total(tensors: dict[str, tuple[str, int]]) -> int:
    return sum(size for _, size in tensors.values())
