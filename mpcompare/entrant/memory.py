"""The memory of a step: a few steps of a fresh backend under the memory meter, beside the analytic model."""

from dataclasses import dataclass

from mpcompare.contract import Backend, Batches, MemoryModel, Stepper
from mpcompare.cost import memory
from mpcompare.entrant.setup import Setup
from mpcompare.instruments import meter
from mpcompare.native import ops
from mpcompare.native.graph import WARMUP


@dataclass(frozen=True)
class Memory:
    """A part of ``result.json``, in bytes.

    Attributes:
        batch_bytes: inputs and targets of a batch.
        peak_memory_bytes: the batch, and the most that torch's allocator had handed out at a time.
        peak_memory_bytes_analytic: the same by the backend's model; None where it has none.
        memory_model: :meth:`mpcompare.contract.Backend.memory_model`.
        memory_by_op, memory_reserved_bytes, graph_pool_bytes: of :class:`mpcompare.instruments.meter.Peak`.
        workspace_bytes: memory in which matrix products compute, outside of tensors.
    """

    batch_bytes: int
    peak_memory_bytes: int
    peak_memory_bytes_analytic: int | None
    memory_model: MemoryModel
    memory_by_op: dict[str, int]
    memory_reserved_bytes: int | None
    graph_pool_bytes: int | None
    workspace_bytes: int


def measure_memory(setup: Setup) -> Memory:
    """Measures the peak of a fresh backend's first steps."""
    batch = next(setup.batches())
    batch_bytes = sum(x.nbytes + y.nbytes for x, y in batch)
    backends: list[Backend] = []

    def run() -> list[Backend]:
        backends.append(_first_steps(setup.new_stepper(), batch))
        return backends

    peak = meter.peak_memory(setup.device, run)
    model = backends[0].memory_model()
    workspaces = _workspaces(setup, peak)
    if model and setup.device.type == "cuda" and workspaces:  # there they are part of the peak
        model = {**model, "workspace": workspaces}
    return Memory(
        batch_bytes=batch_bytes,
        peak_memory_bytes=peak.bytes + batch_bytes,
        peak_memory_bytes_analytic=memory.allocated_bytes(model) if model else None,
        memory_model=model,
        memory_by_op=peak.by_op,
        memory_reserved_bytes=peak.reserved_bytes,
        graph_pool_bytes=peak.graph_pool_bytes,
        workspace_bytes=sum(workspaces.values()),
    )


def _workspaces(setup: Setup, peak: meter.Peak) -> dict[str, int]:
    """Bytes that matrix products hold to compute in, by who asked for them: a library's choice, so never predicted."""
    native = setup.engine.startswith("native")
    if setup.device.type == "cpu":
        found = {"packing buffers": ops.workspace_bytes() if native else 0}
    else:
        found = {"cuBLAS": peak.workspace_bytes or 0, "cublasLt": ops.lt_workspace_bytes() if native else 0}
    return {name: size for name, size in found.items() if size}


def _first_steps(stepper: Stepper, batch: Batches) -> Backend:
    """The second step runs with everything that outlives the first; the third is where graphs are captured."""
    for _ in range(WARMUP + 1):
        stepper.step(batch)
    return stepper.backend
