"""Backends by their names, and steps of a backend that is driven by hand."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from support.marks import CUDA

from mpcompare import contract
from mpcompare.backends.amp import Amp
from mpcompare.backends.amp_compile import AmpCompile
from mpcompare.backends.amp_graph import AmpGraph
from mpcompare.backends.fp32 import Fp32
from mpcompare.backends.fused import Fused
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.scratch import Scratch
from mpcompare.backends.tf32 import Tf32
from mpcompare.contract import Backend, in_one_piece, options_of, show_gradients
from mpcompare.loss_scale import LossScale, NoLossScale
from mpcompare.tasks.task import Task

BACKENDS: dict[str, type[Backend]] = {
    "fp32": Fp32, "tf32": Tf32, "amp": Amp, "amp_graph": AmpGraph, "amp_compile": AmpCompile, "scratch": Scratch,
    "fused": Fused, "master_weights": MasterWeights,
}  # fmt: skip
# Each backend in each of its precisions, except TF32: the harness allows TF32, and not the backend.
CUDA_BACKENDS = [(name, p) for name, cls in BACKENDS.items() for p in cls.PRECISIONS if p != "tf32"]
CPU_BACKENDS = [b for b in CUDA_BACKENDS if b[0] != "amp_compile"]  # amp_compile compiles for seconds: test_peers.py


def backends(on_cpu: list[tuple[str, str]], quick: Collection[tuple[str, str]] | None = None) -> pytest.MarkDecorator:
    """Parametrises ``device``, ``name`` and ``precision``: ``on_cpu``, slow unless ``quick``, and all on CUDA."""
    slow = [pytest.mark.slow]
    each = [pytest.param("cpu", *b, marks=[] if quick is None or b in quick else slow) for b in on_cpu]
    each += [pytest.param("cuda", *b, marks=CUDA.marks) for b in CUDA_BACKENDS]
    return pytest.mark.parametrize(("device", "name", "precision"), each, indirect=["device"])


each_backend = backends(CPU_BACKENDS)
# Each backend in one precision, and slow in its others.
each_backend_once = backends(
    CPU_BACKENDS,
    quick=[
        *(("fp32", "fp32"), ("amp", "bf16"), ("amp_graph", "bf16"), ("master_weights", "bf16"), ("scratch", "fp16")),
        ("fused", "fp16"),
    ],
)


def make_backend(
    name: str,
    task: Task,
    precision: str,
    device: torch.device,
    loss_scale: LossScale | None = None,
    engine: str = "native",
    seed: int = 0,
) -> Any:
    """Returns a backend with the initial weights of ``seed``; ``engine`` is for backends that have that option."""
    options = {"engine": engine} if "engine" in options_of(BACKENDS[name]) else {}
    model = task.new_model(seed, device)
    return BACKENDS[name](model, task, precision, loss_scale or NoLossScale(), **options)


def take_step(backend: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Takes a step on a batch, in the task's micro-batches and at its learning rate. Returns the loss."""
    return contract.take_step(backend, backend.task.micro_batches(x, y), backend.task.optimizer.lr)


def step_to_gradients(backend: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Takes a step up to where its gradients can be seen: to its end where the step is one piece. Returns copies of
    the loss and the gradients."""
    loss, grads = show_gradients(backend, [(x, y)], backend.task.optimizer.lr)
    return loss.clone(), {name: g.clone() for name, g in grads.items()}


def finish_step(backend: Any) -> None:
    """Takes the rest of a step that :func:`step_to_gradients` began."""
    if not in_one_piece(backend):
        backend.clip()
        backend.step(backend.task.optimizer.lr)
        backend.update()
