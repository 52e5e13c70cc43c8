"""The task that every implementation solves: a torch module, a loss, an optimizer, a schedule and a batch size.

Parameters, gradients and buffers travel as ``dict[str, Tensor]`` under the module's own names and in its own layouts.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.errors import InputError, check_number, check_whole
from mpcompare.tasks.draws import EXAMINED, draws, seed_step
from mpcompare.tasks.groups import check_groups
from mpcompare.tasks.losses import LOSSES, Loss, MaskedCrossEntropy, shares
from mpcompare.tasks.optimizers import Optimizer
from mpcompare.tasks.rates import Rates
from mpcompare.tasks.schedules import Constant, Schedule

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A network and its training, the same for every backend.

    Attributes:
        model: makes the network, an ``nn.Module`` that is called with a batch's inputs ``[n, ...]``, with initial
            weights from torch's global generator.
        loss: ``cross_entropy``, ``masked_cross_entropy`` or ``mse`` (:mod:`mpcompare.tasks.losses`), or a callable of
            output and targets that returns a scalar.
        optimizer: the formula that updates the weights (:mod:`mpcompare.tasks.optimizers`).
        batch_size: samples of a batch, all that one update sees. Only whole batches are used.
        schedule: the learning rate of each update (:mod:`mpcompare.tasks.schedules`).
        accumulate: the number of micro-batches, of equal size, in which a batch is computed; their gradients are added.
            Where the loss counts its labels, each is weighted by its share of them.
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
            raise InputError(
                "task.loss", type(self.loss).__name__, "has parameters of its own: put them into the model"
            )
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

    def micro_batches(self, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
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
        """Returns the network with its initial weights, fp32, in training mode.

        The weights are drawn on the CPU whatever the device, so that every backend on every device starts from the same
        bits.

        Raises:
            InputError: ``model`` makes no module, or one that cannot be compared, or the optimizer has a group without
                parameters.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
        if not isinstance(model, nn.Module):
            raise InputError("task.model", type(model).__name__, "expected a torch.nn.Module")
        name = type(model).__name__
        if not any(p.requires_grad for p in model.parameters()):
            raise InputError("task.model", name, "has no parameters to train")
        for where, p in model.named_parameters():
            if p.dtype is not torch.float32:
                raise InputError(
                    "task.model", name, f"parameter {where} is {p.dtype}: expected initial weights in fp32"
                )
        check_groups(self.optimizer, model.named_parameters())
        return model.to(device).train()


def with_values(model: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
    """Returns a copy of ``model`` with the values of ``params`` and ``buffers``, as far as they are given."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for named, values in ((model.named_parameters(), params), (model.named_buffers(), buffers)):
            for name, tensor in named:
                if name in values:
                    tensor.copy_(values[name])
    return model


def params_of(model: nn.Module) -> Params:
    """Returns the parameters themselves, detached."""
    return {name: p.detach() for name, p in model.named_parameters()}


def buffers_of(model: nn.Module) -> Params:
    """Returns the buffers themselves, detached."""
    return {name: b.detach() for name, b in model.named_buffers()}


def try_out(model: nn.Module, task: Task, x: Tensor, y: Tensor, data: str) -> None:
    """Calls a copy of the network and the loss on a few samples, so that a task that cannot work fails before training.

    Args:
        x, y: all training samples of the data set named ``data``.

    Raises:
        InputError: the batch is larger than the data, the network cannot be called with it, the loss is no scalar, or
            the output is random in a way that nobody could repeat, or in evaluation mode.
    """
    if task.batch_size > len(x):
        raise InputError("task.batch_size", task.batch_size, f"data={data} has only {len(x)} samples")
    few, targets = x[:4], y[:4]
    name = type(model).__name__
    model = copy.deepcopy(model)
    with _forked_generators(x.device), torch.no_grad():
        try:
            output, again = _called_alike(model, few)
        except Exception as error:
            given = f"data={data}, inputs {_shape(few)}"
            raise InputError("task.model", name, f"cannot be called with {given}: {_first_line(error)}") from error
        if not isinstance(output, Tensor):
            raise InputError("task.model", name, f"returns a {type(output).__name__}: expected one tensor")
        if not torch.equal(output, again) and not output.isnan().any():
            expected = "draws random numbers that torch.manual_seed does not repeat: expected torch's own"
            raise InputError("task.model", name, expected)
        if draws(lambda: model.eval()(few), x.device):
            expected = "draws random numbers in evaluation mode, too: F.dropout wants training=self.training"
            raise InputError("task.model", name, expected)
        model.train()
        both = f"data={data}, output {_shape(output)}, targets {_shape(targets)}"
        own_name = getattr(task.loss, "__name__", type(task.loss).__name__)
        loss_name = task.loss if isinstance(task.loss, str) else own_name
        try:
            if task.loss in ("cross_entropy", "masked_cross_entropy") and not y.is_floating_point():
                _check_classes(y, output.shape[-1], masked=task.loss == "masked_cross_entropy")
            loss = task.loss_fn(output, targets)
            if parts := shares(task.loss_fn, [targets, targets]):
                float(parts[0])
        except Exception as error:
            raise InputError("task.loss", loss_name, f"cannot be taken of {both}: {_first_line(error)}") from error
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError("task.loss", loss_name, f"gives {found} for {both}: expected a scalar")


def _called_alike(model: nn.Module, x: Tensor) -> list[Any]:
    """Returns the outputs of two calls that begin with the same random numbers."""
    outputs = []
    for _ in range(2):
        seed_step(EXAMINED)
        outputs.append(model(x))
    return outputs


def _forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context that puts torch's generators back in the end."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def _check_classes(y: Tensor, classes: int, masked: bool) -> None:
    """Raises ValueError where labels are none of so many classes."""
    counted = y[y != MaskedCrossEntropy.ignored] if masked else y
    if not len(counted):
        raise ValueError("every label is left out")
    if int(counted.max()) >= classes:
        raise ValueError(f"there are {int(counted.max()) + 1} classes")
    if int(counted.min()) < 0:
        raise ValueError(f"a label is {int(counted.min())}, and masked_cross_entropy leaves out those of -100")


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
