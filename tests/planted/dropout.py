"""Planted bugs in dropout, and in activations that are computed again in backward."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.registry import BF16, Family
from support.networks import DroppingCnn, DroppingGpt
from support.tasks import part
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mpcompare.backends.amp import Amp
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.data.text import ALPHABET, topics
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task


def make(cnn: bool = False, functions: bool = False) -> tuple[Task, Dataset]:
    """Returns the task of a transformer, whose dropout is by ``functions`` or modules, or the task of a CNN."""
    if cnn:
        return Task(partial(DroppingCnn, 8, 0.3, False), "cross_entropy", Sgd(0.05, 0.9), 32), part(digits(0, 640), 640)
    model = partial(DroppingGpt, (len(ALPHABET), 24, 32, 4, 2), 0.3, functions)
    return Task(model, "cross_entropy", Sgd(0.1, 0.9), 32), part(topics(0, 24), 640)


DROPOUT = Family("dropout", make, steps=12, precisions=BF16)
FUNCTIONS = {"functions": True}


@DROPOUT.plants("dropout")
class LeftOff(layers.Patched):
    """The network is in evaluation mode."""

    def patch(self, model: Any) -> None:
        model.eval()


DROPOUT.plants("dropout", name="FunctionsLeftOff", task=FUNCTIONS)(LeftOff)


@DROPOUT.plants("dropout")
class OneMaskForAllSteps(Amp):
    """Each step draws the same masks, as a graph does that was captured with the state of its generator."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(0)
        return super().forward(x, y)


@DROPOUT.plants("forward pass")
class Unscaled(layers.Patched):
    """The elements that one layer keeps are not divided by ``1 - p``. (Nobody could tell it of all layers: the last
    norm divides it out.)"""

    def patch(self, model: Any) -> None:
        drop = model.blocks[0].drop1
        drop.register_forward_hook(lambda *args: args[2] * (1 - drop.p))


@DROPOUT.plants("forward pass")
class OtherProbability(layers.Patched):
    """One layer drops with another probability."""

    def patch(self, model: Any) -> None:
        model.drop.p = 0.25


class _NoMaskInBackward(torch.autograd.Function):
    """Dropout whose gradient is the identity's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


@DROPOUT.plants("input gradient")
class MaskForgottenInBackward(layers.Patched):
    def patch(self, model: Any) -> None:
        drop = model.blocks[1].drop2
        drop.forward = lambda x: _NoMaskInBackward.apply(x, drop.p)


class Again(layers.Patched):
    """``amp`` that computes the blocks of a transformer again in backward."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.forward = partial(self.again, block.forward)

    def again(self, forward: Any, x: Tensor) -> Tensor:
        return checkpoint(forward, x, use_reentrant=False)


@DROPOUT.plants("input gradient")
class OtherMasksTheSecondTime(Again):
    """The state of the generators is not kept for the second computation."""

    def again(self, forward: Any, x: Tensor) -> Tensor:
        return checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)


DROPOUT.plants("input gradient", name="OtherMasksTheSecondTimeInFunctions", task=FUNCTIONS)(OtherMasksTheSecondTime)


class _AgainOutsideOfAutocast(torch.autograd.Function):
    """A checkpoint that forgets autocast: forward is computed again in fp32."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor, *_: Tensor) -> Tensor:
        ctx.function, ctx.state = function, torch.get_rng_state()
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            ctx.function(x).backward(grad)
        return None, x.grad


@DROPOUT.plants("precision")
class ComputedAgainInFp32(Again):
    def again(self, forward: Any, x: Tensor) -> Tensor:
        return _AgainOutsideOfAutocast.apply(forward, x)


@DROPOUT.plants("running statistics", task={"cnn": True})
class StatisticsMovedTwice(layers.Patched):
    """The statistics move once more, as in a checkpoint's second computation. But the network has no checkpoint."""

    def patch(self, model: Any) -> None:
        second = model.second
        model.second = lambda x: checkpoint(second, x, use_reentrant=False)
