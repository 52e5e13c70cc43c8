"""Planted bugs in the training of a convolutional network with batch norm."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.registry import BF16, Family
from support.tasks import part
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.contract import State
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.images import MnistCnn
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task


def make() -> tuple[Task, Dataset]:
    return Task(partial(MnistCnn, 8), "cross_entropy", Sgd(0.05, 0.9), 32), part(digits(0, 640), 640)


CNN = Family("cnn", make, steps=12, precisions=BF16)


@CNN.plants("running statistics")
class NormIn16Bits(layers.Patched):
    """The batch norm sums, subtracts and divides in 16 bits."""

    def patch(self, model: Any) -> None:
        norm, dtype = model.norm2, self.compute_dtype

        def forward(x: Tensor) -> Tensor:
            x = x.to(dtype)
            mean = x.mean((0, 2, 3))
            centred = x - mean[:, None, None]
            var = centred.square().mean((0, 2, 3))
            with torch.no_grad():
                n = x.numel() / x.shape[1]
                norm.running_mean.lerp_(mean.float(), norm.momentum)
                norm.running_var.lerp_(var.float() * n / (n - 1), norm.momentum)
                norm.num_batches_tracked += 1
            normed = centred / (var + norm.eps).sqrt()[:, None, None]
            return normed * norm.weight.to(dtype)[:, None, None] + norm.bias.to(dtype)[:, None, None]

        norm.forward = forward


@CNN.plants("buffers in 16 bits")
class StatisticsIn16Bits(MasterWeights):
    """The running statistics are kept in 16 bits."""

    def update(self) -> None:
        super().update()
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(buffer.to(self.compute_dtype))


@CNN.plants("running statistics")
class StaleStatistics(layers.Patched):
    """One batch norm does not keep its running statistics."""

    def patch(self, model: Any) -> None:
        model.norm2.momentum = 0.0


@CNN.plants("running statistics")
class WrongMomentum(layers.Patched):
    def patch(self, model: Any) -> None:
        for norm in (model.norm1, model.norm2):
            norm.momentum = 1 - norm.momentum


@CNN.plants("running statistics")
class BiasedVariance(Amp):
    """The running variance divides by n, not by n - 1."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.before = self.model.norm2.running_var.clone()
        self.samples = len(x) * (x.shape[2] // 2) ** 2
        return super().forward(x, y)

    def backward(self) -> None:
        super().backward()
        norm = self.model.norm2
        kept = (1 - norm.momentum) * self.before
        norm.running_var.copy_(kept + (norm.running_var - kept) * (self.samples - 1) / self.samples)


@CNN.plants("normalization")
class NormInEvaluationMode(layers.Patched):
    def patch(self, model: Any) -> None:
        model.norm1.eval()


@CNN.plants("normalization")
class StatisticsAreConstants(layers.Patched):
    """Backward takes mean and variance for constants."""

    def patch(self, model: Any) -> None:
        norm = model.norm1
        original = norm.forward

        def forward(x: Tensor) -> Tensor:
            original(x.detach())
            x = x.float()
            mean, var = x.detach().mean((0, 2, 3)), x.detach().var((0, 2, 3), unbiased=False)
            return F.batch_norm(x, mean, var, norm.weight, norm.bias, eps=norm.eps)

        norm.forward = forward


CNN.plants("normalization")(layers.variant(layers.WrongEps, norm="norm1"))


# The gradient goes one pixel to the right.
CNN.plants("input gradient", name="PoolingGradientToTheWrongPlace")(
    layers.variant(layers.WrongInputGradient, layer="pool1", wrong=lambda _, g: g.roll(1, dims=3))
)
# Each of the four pixels gets the whole gradient.
CNN.plants("input gradient", name="PoolingGradientNotDivided")(
    layers.variant(layers.WrongInputGradient, layer="pool1", wrong=lambda _, g: 4 * g)
)
# Half of the channels pass no gradient down.
CNN.plants("input gradient", name="DetachedBranch")(
    layers.variant(
        layers.WrongInputGradient, layer="conv2", wrong=lambda _, g: torch.cat([g[:, ::2] * 0, g[:, 1::2]], dim=1)
    )
)


CNN.plants("gradient missing", name="BiasGradientMissing")(
    layers.variant(layers.GradientMissing, parameter="output.bias")
)


@CNN.plants("bias sum", invisible="a sum of 32 numbers in 16 bits is hardly worse than rounding each of them")
class BiasSummedIn16Bits(Amp):
    """The last bias's gradient is a running sum in 16 bits."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def summed(grad: Tensor) -> None:
            self.total = layers.running_sum(grad, self.compute_dtype).float()

        hook = self.model.output.register_forward_hook(lambda *args: args[2].register_hook(summed) and None)
        loss = super().forward(x, y)
        hook.remove()
        return loss

    def backward(self) -> None:
        super().backward()
        self.model.output.bias.grad.copy_(self.total)


@CNN.plants("products")
class KernelFlipped(Amp):
    """The kernel's gradient is flipped."""

    def backward(self) -> None:
        super().backward()
        self.model.conv2.weight.grad = self.model.conv2.weight.grad.flip(2, 3)


CNN.plants("loss", name="CnnLossIn16Bits")(layers.LossIn16Bits)


@CNN.plants("loss")
class LabelsOfTheRowBefore(Amp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y.roll(1))


CNN.plants("update left out", name="CnnLayerNotUpdated")(layers.variant(layers.NotUpdated, layer="conv2"))
CNN.plants("no master weights", name="CnnLayerWithoutMasters")(layers.variant(layers.RoundedWeights, layer="conv2"))


@CNN.plants("later steps")
class StaleCopiesOfOneLayer(MasterWeights):
    """The 16-bit weights of one layer stay as they were at the start."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.stale = self.model.conv1.weight.detach().clone()  # type: ignore[operator, union-attr]

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        with torch.no_grad():
            self.model.conv1.weight.copy_(self.stale)  # type: ignore[operator, union-attr]


@CNN.plants("resume")
class MomentsSwappedByLoading(Amp):
    """A loaded backend numbers two tensors of one shape the other way round, and numbers them back when it saves."""

    turned = False
    names = ("norm1.weight", "norm1.bias")

    def swapped(self, state: State) -> State:
        if not self.turned:
            return state
        a, b = self.names
        optimizer = {kind: {**t, a: t[b], b: t[a]} if a in t else t for kind, t in state["optimizer"].items()}
        return {**state, "optimizer": optimizer}

    def load_state_dict(self, state: State) -> None:
        self.turned = True
        super().load_state_dict(self.swapped(state))

    def state_dict(self) -> State:
        return self.swapped(super().state_dict())
