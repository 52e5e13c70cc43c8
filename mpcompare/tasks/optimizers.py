"""The optimizers: each as torch's own, and as a replay in float64 beside which the updates of a backend are held."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mpcompare.errors import check_number


class Replay(Protocol):
    """An optimizer in float64, tensor by tensor, on the gradients that a backend says it has."""

    def step(self, name: str, grad: Tensor) -> tuple[Tensor, Tensor]:
        """What is to be added to the weight ``name`` for its gradient (float64), and the same sum of absolute values:
        what rounding errors are relative to."""


class Optimizer(Protocol):
    """What updates the weights, by rules and names of ``torch.optim``."""

    @property
    def lr(self) -> float:
        """Learning rate."""

    @property
    def remembers(self) -> bool:
        """Whether a step depends on the ones before it."""

    def make(self, params: Iterable[nn.Parameter], fused: bool = False) -> torch.optim.Optimizer:
        """Of torch's own; ``fused``: one kernel, which skips on the device where a ``GradScaler`` says so."""

    def replay(self) -> Replay:
        """A new replay, before the first step."""


@dataclass(frozen=True)
class Sgd:
    """``v = momentum v + g; w = w - lr v``, as ``torch.optim.SGD`` has it.

    Attributes:
        lr, momentum: finite; ``momentum`` in [0, 1), 0 for none.
    """

    lr: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_number("task.optimizer.lr", self.lr, above=0)
        if self.momentum != 0:
            check_number("task.optimizer.momentum", self.momentum, above=0, below=1)

    @property
    def remembers(self) -> bool:
        return self.momentum > 0

    def make(self, params: Iterable[nn.Parameter], fused: bool = False) -> torch.optim.SGD:
        params = list(params)
        optimizer = torch.optim.SGD(params, lr=self.lr, momentum=self.momentum, fused=fused or None)
        if fused and self.momentum:  # it makes buffers of its own in the first step, and skipping that never fills them
            for p in params:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return optimizer

    def replay(self) -> "SgdReplay":
        return SgdReplay(self.lr, self.momentum)


class SgdReplay:
    """:class:`Sgd` in float64."""

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.velocity: dict[str, Tensor] = {}
        self.magnitude: dict[str, Tensor] = {}

    def step(self, name: str, grad: Tensor) -> tuple[Tensor, Tensor]:
        velocity, magnitude = grad, grad.abs()
        if self.momentum:
            if name in self.velocity:
                velocity = self.momentum * self.velocity[name] + velocity
                magnitude = self.momentum * self.magnitude[name] + magnitude
            self.velocity[name], self.magnitude[name] = velocity, magnitude
        return -self.lr * velocity, self.lr * magnitude
