"""The footprint of each recipe: the bytes that are live at the fullest moment of its first steps, by kind."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.contract import Walk
from mpcompare.errors import BackendUnavailable, InputError
from mpcompare.footprint.eight_bit import Quantized
from mpcompare.footprint.fake import Fake, MeasuredKernels, without_data
from mpcompare.footprint.live import Allocation, Live
from mpcompare.footprint.recipes import RECIPES, FootprintRecipe
from mpcompare.instruments import meter
from mpcompare.tasks.groups import params_in
from mpcompare.tasks.task import Task

STEPS = 2  # the second step runs with everything that outlives the first
# In the order of a figure: tensors that a step gets, tensors that it keeps for the next, tensors that come and go.
KINDS = (
    "inputs",
    "params",  # the parameters that the optimizer updates; for inference, all
    "buffers",
    "optimizer state",
    "compute copies",  # 16-bit weights that a backend keeps for itself
    "cast cache",  # 16-bit weights that autocast makes in forward
    "activations",  # all else that forward makes
    "all gradients",  # all that backward makes: gradients of activations and of weights
    "update",  # all that clipping and the optimizer make and drop
    "workspace",  # memory inside of kernels, where it is measured
)


@dataclass(frozen=True)
class Batch:
    """The shape of a batch's inputs."""

    shape: tuple[int, ...]  # the shape of one sample
    dtype: torch.dtype  # fp32, or int64 for ids

    def tensors(self, model: nn.Module, task: Task) -> tuple[Tensor, Tensor]:
        """Returns the inputs of a batch, and targets that fit the network's output."""
        x = torch.zeros(task.batch_size, *self.shape, dtype=self.dtype)
        with torch.no_grad():
            output = model(x[:2])  # a batch norm refuses one sample
        if task.loss == "mse":
            return x, torch.zeros(task.batch_size, *output.shape[1:])
        return x, torch.zeros(task.batch_size, *output.shape[1:-1], dtype=torch.int64)


@dataclass(frozen=True)
class FootprintSubject:
    """A network with its training."""

    title: str  # one line about it
    task: Task
    model: nn.Module  # the module, on the meta device where it can be made there
    batch: Batch  # the shape of its inputs
    is_task: bool  # whether it is a task of conf/task, which is small enough to be computed


@dataclass(frozen=True)
class Footprint:
    """The fullest moment of the steps."""

    by_kind: dict[str, int]  # bytes of each of ``KINDS``, without zeros
    phase: str  # the phase of the fullest moment

    @property
    def bytes(self) -> int:
        return sum(self.by_kind.values())


def survey(subject: FootprintSubject, kernels: MeasuredKernels | None = None) -> dict[FootprintRecipe, Footprint | str]:
    """Returns the footprint of each recipe, or the reason why it has none, in one line. Raises InputError where not
    even the first recipe, fp32, can take a step: the network cannot be called with these inputs."""
    footprints: dict[FootprintRecipe, Footprint | str] = {}
    for recipe in RECIPES:
        try:
            footprints[recipe] = count(recipe, subject.model, subject.task, subject.batch, kernels)
        except BackendUnavailable as error:
            footprints[recipe] = str(error)
        except Exception as error:  # anything that a network can raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if recipe is RECIPES[0]:
                raise InputError("NAME", subject.title, f"cannot take a step ({reason})") from error
            footprints[recipe] = f"cannot take a step ({reason})"
    return footprints


def count(
    recipe: FootprintRecipe, model: nn.Module, task: Task, batch: Batch, kernels: MeasuredKernels | None = None
) -> Footprint:
    """Returns the footprint of the first steps of a recipe; no step is computed.

    Args:
        model: in training mode; its tensors lose their data.
        kernels: measures the memory inside of kernels; None: it is not counted.
    """
    mode, live = Fake(), Live(kernels)
    model = without_data(model, mode)
    with meter.frozen(), mode:
        x, y = batch.tensors(model, task)
        live.leave_out((x, y, *model.parameters(), *model.buffers()))
        with live:
            backend = recipe.make(model, task)
            live.end_phase("construction")
            live.name_params(backend.model.parameters())
            start = len(live.changes)
            for _ in range(STEPS):
                for phase in Walk(backend, task.micro_batches(x, y), task.optimizer.lr):
                    live.end_phase(phase)
            kinds = _kinds_of_what_stays(backend, live)
        full = meter.fullest([(size, id(each), each) for size, each in live.changes], start)[1]
    by_kind = Counter({"inputs": x.nbytes + y.nbytes})
    for allocation in full:
        by_kind[kinds.get(id(allocation)) or _kind_of_what_goes(allocation)] += allocation.bytes
    return Footprint({kind: by_kind[kind] for kind in KINDS if by_kind[kind]}, full[-1].phase)  # the newest one's


def _kinds_of_what_stays(backend: Any, live: Live) -> dict[int, str]:
    """Returns the kinds of the allocations that outlive a step, by their ids."""
    optimizer = getattr(backend, "optimizer", None)
    updated = params_in(optimizer) if optimizer else []
    groups = {
        "compute copies": list(backend.model.parameters()) if optimizer else [],
        "buffers": list(backend.model.buffers()) if optimizer else [],
        "params": updated or [*backend.model.parameters(), *backend.model.buffers()],
        "optimizer state": _state(optimizer) if optimizer else [],
    }
    return {id(live.allocation(tensor)): kind for kind, tensors in groups.items() for tensor in tensors}


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the tensors of an optimizer's state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    parts = [each for v in values for each in ((v.codes, v.scales) if isinstance(v, Quantized) else (v,))]
    return [each for each in parts if isinstance(each, Tensor)]


def _kind_of_what_goes(allocation: Allocation) -> str:
    if allocation.inside:
        return "workspace"
    if allocation.phase == "backward":
        return "all gradients"
    if allocation.phase in ("unscale", "clip", "step", "update"):
        return "update"
    return "cast cache" if allocation.cast_of_param else "activations"
