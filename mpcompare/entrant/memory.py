"""The pass on the memory of a step: a few steps of a fresh backend under the memory meter, and the analytic model."""

from mpcompare.contract import Backend, Batches, Stepper, memory_model_of, warmup_steps, workspaces
from mpcompare.cost import allocated_bytes
from mpcompare.entrant.state import Entrant
from mpcompare.fields import MemoryRecord
from mpcompare.instruments import meter
from mpcompare.tasks.batch import nbytes

MIN_STEPS = 3  # the second step runs with everything that outlives the first


def take(entrant: Entrant) -> MemoryRecord:
    """Measures the peak of a fresh backend's first steps. Needs ``setup``. Leaves nothing."""
    setup, batch = entrant.setup, next(entrant.setup.batches())
    batch_bytes = nbytes(*(each for pair in batch for each in pair))
    backends: list[Backend] = []

    def run() -> list[Backend]:
        backends.append(first_steps(setup.new_stepper(), batch))
        return backends

    peak = meter.peak_memory(setup.device, run)
    model, workspace = memory_model_of(backends[0]), workspaces(backends[0])
    if setup.device.type == "cuda":
        if peak.workspace_bytes:
            workspace = {"cuBLAS": peak.workspace_bytes, **workspace}
        if model and workspace:  # on a GPU workspaces are part of the peak
            model = {**model, "workspace": workspace}
    return MemoryRecord(
        batch_bytes=batch_bytes,
        peak_memory_bytes=peak.bytes + batch_bytes,
        peak_memory_bytes_analytic=allocated_bytes(model) if model else None,
        memory_model=model,
        memory_by_op=peak.by_op,
        memory_reserved_bytes=peak.reserved_bytes,
        graph_pool_bytes=peak.graph_pool_bytes,
        workspace_bytes=sum(workspace.values()),
    )


def first_steps(stepper: Stepper, batch: Batches) -> Backend:
    """Takes the first steps of a backend: the steps of its warm-up and one more. Returns the backend."""
    for _ in range(max(MIN_STEPS, warmup_steps(stepper.backend) + 1)):
        stepper.step(batch)
    return stepper.backend
