"""The seams of a published training loop, through which a bug can be put in.

A loop is written in the order of calls that its library publishes. It takes the model, the optimizer, the scaler, the
batches, the loss and the clipping from methods. A subclass overrides one of these methods to have a bug. No loop knows
that it is watched.
"""

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Loop:
    """A training loop on a CPU, and what its user meant by it.

    Attributes:
        name: its name in tables.
        where: the address at which it is published.
        precisions: the precisions in which it trains on a CPU.
        micro_batches: the number of backward passes of an update.
        clip_norm: the norm to which gradients are clipped; None: they are not clipped.
        computes: the precision in which it truly computes; None: the precision that was asked for.
        model, optimizer: the objects that a user hands to the watch. The loop uses them throughout.
    """

    name: ClassVar[str]
    where: ClassVar[str]
    precisions: ClassVar[tuple[str, ...]] = ("bf16", "fp16")
    micro_batches: int = 1
    clip_norm: float | None = None
    computes: str | None = None
    model: Any
    optimizer: Any

    def __init__(self, precision: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        self.precision, self.dtype = precision, DTYPES[precision]
        self.generator = torch.Generator().manual_seed(seed + 1)  # for the batches
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()
        self.scaler = self.make_scaler()

    def make_model(self) -> nn.Module:
        raise NotImplementedError

    def make_optimizer(self) -> Optimizer:
        raise NotImplementedError

    def make_scaler(self) -> Any:
        return torch.amp.GradScaler("cpu", enabled=self.precision == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context of forward passes."""
        return torch.autocast("cpu", dtype=self.dtype)

    def clip(self) -> None:
        """Clips the gradients, after they were unscaled."""
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm or 0.0)

    def train(self, updates: int) -> None:
        """Trains from the beginning, for so many calls of the optimizer's step. It is called once."""
        raise NotImplementedError

    @property
    def trained(self) -> nn.Module:
        """The network itself, without the wrappers of its library."""
        model: nn.Module = self.model
        return model

    def normal(self, *shape: int) -> Tensor:
        """Returns normal fp32 numbers of the loop's own generator."""
        return torch.randn(*shape, generator=self.generator)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Returns int64 numbers from 0 to ``below - 1``."""
        return torch.randint(below, shape, generator=self.generator)

    @classmethod
    def meant(cls, precision: str) -> dict[str, Any]:
        """Returns what the user meant, in the words of the watch's ``expect``."""
        meant: dict[str, Any] = {"precision": precision}
        return meant | ({"clip_norm": cls.clip_norm} if cls.clip_norm is not None else {})


LOOPS: list[type[Loop]] = []


def published(loop: type[Loop]) -> type[Loop]:
    """Registers a loop that is right."""
    LOOPS.append(loop)
    return loop


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
