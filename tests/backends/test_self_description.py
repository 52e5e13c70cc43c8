"""A backend's own description of its warm-up and its workspaces, and the defaults for one that has none."""

import pytest
import torch
from support.backends import make_backend, take_step
from support.tasks import make_batch, make_task

from mpcompare.backends.fused import Fused
from mpcompare.contract import Stepper, warmup_steps, workspaces
from mpcompare.entrant.memory import first_steps
from mpcompare.loss_scale import NoLossScale
from mpcompare.native import graph, ops

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["fp32", "amp", "master_weights", "scratch", "fused"])
def test_a_backend_without_a_graph_needs_no_warm_up(name):
    task = make_task()
    assert warmup_steps(make_backend(name, task, "fp32" if name == "fp32" else "bf16", CPU)) == 0


def test_a_graph_is_warmed_up_before_it_is_captured(recorded_graphs):
    task = make_task()
    fused = Fused(task.new_model(0, CPU), task, "bf16", NoLossScale(), graph=True)
    for backend in (make_backend("amp_graph", task, "bf16", CPU), fused):
        assert warmup_steps(backend) == graph.WARMUP
        for _ in range(warmup_steps(backend)):
            backend.train_step([make_batch(task, CPU)], 0.1)
        assert backend.graph.replay is None
        backend.train_step([make_batch(task, CPU)], 0.1)
        assert backend.graph.replay is not None


class Counter:
    """A backend that counts its steps."""

    skipped, taken = False, 0

    def train_step(self, batches, lr):
        self.taken += 1
        return torch.zeros(())


@pytest.mark.parametrize(("warmup", "taken"), [(None, 3), (0, 3), (2, 3), (5, 6)])
def test_the_memory_of_a_step_is_measured_with_all_of_the_warm_up(warmup, taken):
    backend = Counter()
    if warmup is not None:
        backend.warmup_steps = warmup
    assert first_steps(Stepper(backend, make_task().new_rates()), [(None, None)]) is backend
    assert backend.taken == taken


@pytest.mark.parametrize("name", ["scratch", "fused"])
def test_products_of_this_project_name_their_packing_buffers_on_a_cpu(name):
    task = make_task()
    backend = make_backend(name, task, "bf16", CPU)
    take_step(backend, *make_batch(task, CPU))
    assert workspaces(backend) == {"packing buffers": torch.ops.mpcompare.workspace_bytes()}
    assert torch.ops.mpcompare.workspace_bytes() > 0


def test_products_of_torch_have_no_workspace_of_their_own():
    task = make_task()
    for backend in (make_backend("scratch", task, "bf16", CPU, engine="torch"), make_backend("amp", task, "bf16", CPU)):
        take_step(backend, *make_batch(task, CPU))
        assert workspaces(backend) == {}


@pytest.mark.parametrize(("held", "named"), [(32, {"cublasLt": 32}), (0, {})])
def test_the_workspace_of_cublaslt_is_named_where_there_is_one(monkeypatch, held, named):
    monkeypatch.setattr(torch.ops.mpcompare, "lt_workspace_bytes", lambda: held, raising=False)
    assert ops.workspaces("cuda") == named
