"""How much must be live? A few steps of a fresh backend under the memory meter, beside the analytic model."""

from typing import Any

from mpcompare.contract import Backend, Batches, Stepper
from mpcompare.cost import memory
from mpcompare.entrant.setup import Setup
from mpcompare.instruments import meter
from mpcompare.native import ops
from mpcompare.native.graph import WARMUP


def measure_memory(setup: Setup) -> dict[str, Any]:
    """The peak of a fresh backend's first steps, and what its model says of it."""
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
    return {
        "batch_bytes": batch_bytes,
        "peak_memory_bytes": peak.bytes + batch_bytes,
        "peak_memory_bytes_analytic": memory.allocated_bytes(model) if model else None,
        "memory_model": model,
        "memory_by_op": peak.by_op,
        "memory_reserved_bytes": peak.reserved_bytes,
        "graph_pool_bytes": peak.graph_pool_bytes,
        "workspace_bytes": sum(workspaces.values()),
    }


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
