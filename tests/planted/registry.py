"""What planted bugs of every family share: a patched ``amp`` or ``master_weights``, its task, the cause to be named."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from support.correct import part
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.contract import Backend
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.data.text import ALPHABET, topics
from mpcompare.tasks.images import MnistCnn
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt, CharLstm

TASKS: dict[str, Callable[[], tuple[Task, Dataset]]] = {
    "cnn": lambda: (
        Task(partial(MnistCnn, 8), "cross_entropy", Sgd(0.05, 0.9), 32),
        part(digits(0, 640), 640),
    ),
    "lstm": lambda: (
        Task(partial(CharLstm, len(ALPHABET), 32, 1), "cross_entropy", Sgd(0.3, 0.9), 32),
        part(topics(0, 24), 640),
    ),
    "gpt": lambda: (
        Task(partial(CharGpt, len(ALPHABET), 24, 32, 4, 2), "cross_entropy", Sgd(0.1, 0.9), 32),
        part(topics(0, 24), 640),
    ),
    "tied": lambda: (
        Task(partial(CharGpt, len(ALPHABET), 24, 32, 4, 2, True), "cross_entropy", Sgd(0.1, 0.9), 32),
        part(topics(0, 24), 640),
    ),
}
STEPS = 12


@dataclass(frozen=True)
class Planted:
    """A bug.

    Attributes:
        backend: that has it.
        cause: what the verdict should call it.
        task: a key of ``TASKS``.
        invisible: why no check can see it at this task; empty if one can.
    """

    backend: type[Backend]
    cause: str
    task: str
    invisible: str = ""


PLANTED: dict[str, dict[str, Planted]] = {"cnn": {}, "lstm": {}, "gpt": {}}


def plants(family: str, cause: str, task: str = "", invisible: str = "") -> Callable[[type[Backend]], type[Backend]]:
    def register(backend: type[Backend]) -> type[Backend]:
        PLANTED[family][backend.__name__] = Planted(backend, cause, task or family, invisible)
        return backend

    return register


class Patched(Amp):
    """``amp`` whose network's copy is patched by ``patch``."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.patch(self.model)

    def patch(self, model: Any) -> None:
        raise NotImplementedError


class WrongGradient(torch.autograd.Function):
    """The identity, and backward what ``wrong`` makes of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.wrong = wrong
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.wrong(grad), None


def spoil_input_gradient(module: nn.Module, wrong: Callable[[Tensor], Tensor]) -> None:
    """What ``module`` passes down is what ``wrong`` makes of it."""
    module.register_forward_pre_hook(lambda _, args: (WrongGradient.apply(args[0], wrong), *args[1:]))


class LossIn16Bits(Amp):
    """Softmax and loss of the 16-bit logits, in 16 bits."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            output = self.model(x)
        logits = output.to(self.compute_dtype).flatten(0, -2)
        shifted = logits - logits.amax(dim=1, keepdim=True)
        log_probs = shifted - shifted.exp().sum(dim=1, keepdim=True).log()
        self.loss = -log_probs.gather(1, y.flatten()[:, None]).float().mean()
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()


class NotUpdated(Amp):
    """One layer keeps its weights."""

    layer = ""

    def step(self, lr: float | Tensor) -> None:
        kept = {p: p.detach().clone() for p in self.model.get_submodule(self.layer).parameters()}
        super().step(lr)
        with torch.no_grad():
            for p, value in kept.items():
                p.copy_(value)


class RoundedWeights(Amp):
    """One layer has no master weights: its weights are rounded to 16 bits after each step."""

    layer = ""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.round()

    def round(self) -> None:
        with torch.no_grad():
            for p in self.model.get_submodule(self.layer).parameters():
                p.copy_(p.to(self.compute_dtype))

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        self.round()
