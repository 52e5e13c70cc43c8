"""What tests share: the device they run on, small tasks, backends by name, and the command line in this process."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch loads OpenMP: threads that wait let others compute

import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from support.graphs import recorded_graphs  # noqa: F401 - a fixture

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
from mpcompare.dtypes import torch_dtype
from mpcompare.loss_scale import LossScale, NoLossScale
from mpcompare.precision import FORMATS, PRECISIONS
from mpcompare.tasks.mlp import Mlp, PlainMlp, plain_mlp
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task

hypothesis.settings.register_profile("mpcompare", deadline=None, derandomize=True, max_examples=30, database=None)
hypothesis.settings.register_profile("few", deadline=None, derandomize=True, max_examples=3, database=None)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=1000, database=None)  # scripts/sanitize.sh
hypothesis.settings.load_profile("mpcompare")

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
)
BACKENDS: dict[str, type[Backend]] = {
    "fp32": Fp32, "tf32": Tf32, "amp": Amp, "amp_graph": AmpGraph, "amp_compile": AmpCompile, "scratch": Scratch,
    "fused": Fused, "master_weights": MasterWeights,
}  # fmt: skip
# Every backend in every precision, but TF32, which the harness allows and not the backend.
CUDA_COLUMNS = [(name, p) for name, cls in BACKENDS.items() for p in cls.PRECISIONS if not PRECISIONS[p].uses_tf32]
CPU_COLUMNS = [(name, p) for name, p in CUDA_COLUMNS if name != "amp_compile"]  # compiles for seconds: test_peers.py


def columns(on_cpu: list[tuple[str, str]], quick: Collection[tuple[str, str]] | None = None) -> pytest.MarkDecorator:
    """Parametrises ``device``, ``name`` and ``precision``: those on a CPU, slow unless ``quick``, and all on CUDA."""
    slow = [pytest.mark.slow]
    each = [pytest.param("cpu", *c, marks=[] if quick is None or c in quick else slow) for c in on_cpu]
    each += [pytest.param("cuda", *column, marks=CUDA.marks) for column in CUDA_COLUMNS]
    return pytest.mark.parametrize(("device", "name", "precision"), each, indirect=["device"])


each_column = columns(CPU_COLUMNS)
DTYPES = {name: torch_dtype(FORMATS[name]) for name in ("fp32", "fp16", "bf16")}  # of the native operators


# Small tests, and the processes that they start, are quickest on one thread: two wait for each other in every small
# step, for long where other programs compute too.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that starts the tests in the background lets them, and all that they start, ignore Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def slow_after(few: int, values: Iterable[object]) -> list[object]:
    """The values of a parameter, of which all but the first ``few`` are slow: the plain command leaves them out."""
    values = list(values)
    return [*values[:few], *(pytest.param(value, marks=pytest.mark.slow) for value in values[few:])]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For what splits its work between threads."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """On a CPU CUDA graphs are recorded: graphs.py."""
    if request.param == "cpu":
        request.getfixturevalue("recorded_graphs")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def mnist_root() -> Path:
    """The folder that holds MNIST."""
    root = os.environ.get("MPCOMPARE_DATA")
    if not root or not (Path(root) / "MNIST").is_dir():
        pytest.skip("MPCOMPARE_DATA does not name a folder with MNIST")
    return Path(root)


def make_task(
    *,
    in_features: int = 20,
    hidden: Sequence[int] = (24, 16),
    out_features: int = 5,
    loss: str = "cross_entropy",
    batch_size: int = 32,
    samples: int = 96,
    lr: float = 0.1,
    momentum: float = 0.0,
) -> Task:
    """A small MLP that classifies."""
    return Task(partial(Mlp, in_features, hidden, out_features), loss, Sgd(lr, momentum), batch_size, samples)


def mlp_of(task: Task) -> PlainMlp:
    """The shape of such a task."""
    return plain_mlp(task.new_model(0, torch.device("cpu")), task)


def make_batch(task: Task, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal inputs ``[n, in]`` and random targets of an MLP's kind."""
    generator, mlp = torch.Generator().manual_seed(seed), mlp_of(task)
    n = task.batch_size
    x = torch.randn(n, mlp.in_features, generator=generator)
    if task.loss == "mse":
        return x.to(device), torch.randn(n, mlp.out_features, generator=generator).to(device)
    return x.to(device), torch.randint(mlp.out_features, (n,), generator=generator).to(device)


def make_backend(
    name: str,
    task: Task,
    precision: str,
    device: torch.device,
    loss_scale: LossScale | None = None,
    engine: str = "native",
    seed: int = 0,
) -> Any:
    """With initial weights of ``seed``; ``engine`` where the backend has one."""
    options = {"engine": engine} if "engine" in options_of(BACKENDS[name]) else {}
    model = task.new_model(seed, device)
    return BACKENDS[name](model, task, precision, loss_scale or NoLossScale(), **options)


def take_step(backend: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A step on a batch, in the task's micro-batches and at its learning rate. Returns the loss."""
    return contract.take_step(backend, backend.task.micro_batches(x, y), backend.task.optimizer.lr)


def step_to_gradients(backend: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients, copied, of a step that is taken up to where they can be seen: to its end by a backend
    whose step is one piece."""
    loss, grads = show_gradients(backend, [(x, y)], backend.task.optimizer.lr)
    return loss.clone(), {name: g.clone() for name, g in grads.items()}


def finish_step(backend: Any) -> None:
    """What is left of it."""
    if not in_one_piece(backend):
        backend.clip()
        backend.step(backend.task.optimizer.lr)
        backend.update()


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Ended]:
    """``python -m mpcompare ARGS``, or another module's main, in this process and in an empty folder."""

    def run(*args: str, main: Callable[[], None] | None = None) -> Ended:
        from mpcompare.__main__ import main as mpcompare_main

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["mpcompare", *args])
        capfd.readouterr()
        code = 0
        try:
            (main or mpcompare_main)()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return run


# The shape of a run that takes milliseconds and needs no internet.
SMALL = ("data=digits", "task.model.hidden=[32]", "task.batch_size=64", "task.samples=640", "train.steps=4",
         "train.warmup_steps=1", "measure.budget_s=0.2", "measure.block_s=0.01", "inference.budget_s=0.01")  # fmt: skip
