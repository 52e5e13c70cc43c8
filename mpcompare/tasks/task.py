"""The task that every implementation solves: a torch module, a loss, an optimizer, a schedule and a batch size.

Parameters, gradients and buffers travel as ``dict[str, Tensor]`` under the module's own names and in its own layouts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from mpcompare import generators
from mpcompare.dtypes import HALF
from mpcompare.errors import InputError, check_number, check_whole
from mpcompare.tasks.batch import Batch
from mpcompare.tasks.complex_weights import as_real
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.frozen import widen
from mpcompare.tasks.groups import check_groups
from mpcompare.tasks.losses import LOSSES, Loss
from mpcompare.tasks.optimizers import Optimizer
from mpcompare.tasks.schedules import Constant, Rates, Schedule

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A network and its training, the same for every backend.

    Attributes:
        model: makes the network, an ``nn.Module`` with initial weights from torch's global generator. It is called with
            a batch's inputs ``[n, ...]``, which may be several tensors (:mod:`mpcompare.tasks.batch`).
        loss: ``cross_entropy``, ``masked_cross_entropy``, ``mse`` (:mod:`mpcompare.tasks.losses`), or ``model`` for a
            network that returns its loss itself; or a callable of output and targets that returns a scalar.
        optimizer: the formula that updates the weights (:mod:`mpcompare.tasks.optimizers`).
        batch_size: samples of a batch, all that one update sees. Only whole batches are used.
        schedule: the learning rate of each update (:mod:`mpcompare.tasks.schedules`).
        accumulate: the number of micro-batches, of equal size, in which a batch is computed; their gradients are added.
            Where the loss counts its labels, each micro-batch is weighted by its share of the labels.
        clip_norm: the largest norm that all gradients together may have; None: nothing is clipped.
        clip_norm_type: 2, or inf: the largest element.
        samples: training samples to make where the data set is generated; real data sets have their own number.
    """

    model: Callable[[], nn.Module]
    loss: str | Loss
    optimizer: Optimizer
    batch_size: int
    samples: int | None = None
    schedule: Schedule = field(default_factory=Constant)
    accumulate: int = 1
    clip_norm: float | None = None
    clip_norm_type: float = 2.0

    def __post_init__(self) -> None:
        check_whole("task.batch_size", self.batch_size, at_least=1)
        check_whole("task.accumulate", self.accumulate, at_least=1)
        if self.batch_size % self.accumulate:
            expected = f"expected a divisor of task.batch_size={self.batch_size}"
            raise InputError("task.accumulate", self.accumulate, expected)
        if self.clip_norm is not None:
            check_number("task.clip_norm", self.clip_norm, above=0)
        if str(self.clip_norm_type) not in ("2", "2.0", "inf"):
            raise InputError("task.clip_norm_type", self.clip_norm_type, "expected one of 2, inf")
        object.__setattr__(self, "clip_norm_type", float(self.clip_norm_type))
        if self.samples is not None:
            check_whole("task.samples", self.samples, at_least=1)
        if isinstance(self.loss, nn.Module) and any(True for _ in self.loss.parameters()):
            expected = "has parameters of its own: put them into the model"
            raise InputError("task.loss", type(self.loss).__name__, expected)
        if not callable(self.loss) and self.loss not in LOSSES:
            expected = f"expected one of {', '.join(LOSSES)}, or a node with the _target_ of a callable"
            raise InputError("task.loss", self.loss, expected)

    @property
    def loss_fn(self) -> Loss:
        """The loss as a function, ``(output, targets) -> scalar``."""
        return LOSSES[self.loss] if isinstance(self.loss, str) else self.loss

    @property
    def micro_batch_size(self) -> int:
        """The number of samples that forward and backward see at once."""
        return self.batch_size // self.accumulate

    def micro_batches(self, x: Batch, y: Batch) -> list[tuple[Batch, Batch]]:
        """Returns a batch as its micro-batches, which are views of it."""
        rows = self.micro_batch_size
        return list(zip(x.split(rows), y.split(rows), strict=True))

    def over(self, updates: int) -> "Task":
        """Returns the same task in a run of so many updates, over which its schedule is spread."""
        return replace(self, schedule=self.schedule.over(updates))

    def new_rates(self, updates: int = 0) -> Rates:
        """Returns the learning rates of a run in which so many ``updates`` were taken."""
        return Rates(self.optimizer.lr, self.schedule, updates)

    def new_model(self, seed: int, device: torch.device) -> nn.Module:
        """Returns the network with its initial weights, fp32, in training mode. Frozen ones in 16 bits are widened.

        The weights are drawn on the CPU whatever the device, so that every backend on every device starts from the same
        bits. Raises InputError where ``model`` makes no module, or a module that cannot be copied or compared, or the
        optimizer has a group without parameters."""
        with torch.random.fork_rng(devices=[]):
            generators.seed(seed)
            model = self.model()
        if not isinstance(model, nn.Module):
            raise InputError("task.model", type(model).__name__, "expected a torch.nn.Module")
        name = type(model).__name__
        if not any(p.requires_grad for p in model.parameters()):
            raise InputError("task.model", name, "has no parameters to train")
        for where, p in model.named_parameters():
            if fault := _fault(p):
                raise InputError("task.model", name, f"parameter {where} is {fault}")
        try:
            model = copy_of(model)  # the function may return the same one each time
        except Exception as error:
            raise InputError("task.model", name, f"cannot be copied ({type(error).__name__}: {error})") from error
        as_real(model)
        check_groups(self.optimizer, model.named_parameters())
        return widen(model).to(device).train()


def _fault(parameter: nn.Parameter) -> str:
    """Returns why no backend can train a parameter, and what to change; empty where one can."""
    if isinstance(parameter, UninitializedParameter):
        return "lazy: expected a shape from the start, as of a network that was called with a sample"
    of_parts = parameter.dtype.to_real()  # of a complex weight
    if of_parts is not torch.float32 and (parameter.requires_grad or of_parts not in HALF):
        expected = "expected fp32, in which weights that are trained begin; frozen ones may have 16 bits"
        return f"{parameter.dtype}: {expected}"
    if parameter.layout is not torch.strided or parameter.is_meta:
        return f"{parameter.layout if not parameter.is_meta else 'on the device meta'}: expected numbers, in rows"
    if parameter.is_inference():
        return "made in torch.inference_mode(): expected torch.no_grad() in its place"
    return "" if parameter.numel() else f"of shape {list(parameter.shape)}: expected at least one number"


def with_values(model: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
    """Returns a copy of ``model`` with the values in ``params`` and ``buffers``; others stay as they are."""
    model = copy_of(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in params:
                p.copy_(params[name])
    put_buffers(model, buffers)
    return model


def sharing_parameters(model: nn.Module, buffers: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Returns a copy of ``model`` with the same parameters, which nobody may write into. Its buffers are its own, and
    have the values in ``buffers`` where these are given."""
    model = copy_of(model, {id(p): p for p in model.parameters()})
    put_buffers(model, buffers or {})
    return model


def put_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Writes ``values`` into the buffers with these names. A forward pass may make a buffer, or put one of another
    shape in its place, such as a table of positions for longer sequences. Then a copy of the value takes its place."""
    own, device = dict(model.named_buffers()), next((p.device for p in model.parameters()), None)
    for name, value in values.items():
        b = own.get(name)
        if b is not None and b.shape == value.shape:
            with torch.no_grad():
                b.copy_(value)
        else:
            layer, _, last = name.rpartition(".")
            kind = {"device": device} if b is None else {"device": b.device, "dtype": b.dtype}
            model.get_submodule(layer)._buffers[last] = value.detach().to(**kind, copy=True)


def params_of(model: nn.Module) -> Params:
    """Returns the parameters themselves, detached."""
    return {name: p.detach() for name, p in model.named_parameters()}


def buffers_of(model: nn.Module) -> Params:
    """Returns the buffers themselves, detached."""
    return {name: b.detach() for name, b in model.named_buffers()}
