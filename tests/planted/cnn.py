"""Planted bugs in the training of a convolutional network with batch norm."""

from typing import Any

import torch
import torch.nn.functional as F
from planted.registry import LossIn16Bits, NotUpdated, Patched, RoundedWeights, plants, spoil_input_gradient
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Task


@plants("cnn", "normalization")
class NormIn16Bits(Patched):
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


@plants("cnn", "running statistics")
class StatisticsIn16Bits(MasterWeights):
    """The running statistics are kept in 16 bits."""

    def update(self) -> None:
        super().update()
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(buffer.to(self.compute_dtype))


@plants("cnn", "running statistics")
class StaleStatistics(Patched):
    """One batch norm does not keep its running statistics."""

    def patch(self, model: Any) -> None:
        model.norm2.momentum = 0.0


@plants("cnn", "running statistics")
class WrongMomentum(Patched):
    def patch(self, model: Any) -> None:
        for norm in (model.norm1, model.norm2):
            norm.momentum = 1 - norm.momentum


@plants("cnn", "running statistics")
class BiasedVariance(Amp):
    """The running variance is that of the batch, not that of what it is drawn from: n instead of n - 1."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.before = self.model.norm2.running_var.clone()
        self.samples = len(x) * (x.shape[2] // 2) ** 2
        return super().forward(x, y)

    def backward(self) -> None:
        super().backward()
        norm = self.model.norm2
        kept = (1 - norm.momentum) * self.before
        norm.running_var.copy_(kept + (norm.running_var - kept) * (self.samples - 1) / self.samples)


@plants("cnn", "normalization")
class NormInEvaluationMode(Patched):
    def patch(self, model: Any) -> None:
        model.norm1.eval()


@plants("cnn", "normalization")
class StatisticsAreConstants(Patched):
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


@plants("cnn", "forward pass")
class WrongEps(Patched):
    def patch(self, model: Any) -> None:
        model.norm1.eps = 0.1


@plants("cnn", "input gradient")
class PoolingGradientToTheWrongPlace(Patched):
    """One pixel to the right."""

    def patch(self, model: Any) -> None:
        spoil_input_gradient(model.pool1, lambda g: g.roll(1, dims=3))


@plants("cnn", "gradient scaled")
class PoolingGradientNotDivided(Patched):
    """Each of the four pixels gets the whole gradient."""

    def patch(self, model: Any) -> None:
        spoil_input_gradient(model.pool1, lambda g: 4 * g)


@plants("cnn", "input gradient")
class DetachedBranch(Patched):
    """Half of the channels pass no gradient down."""

    def patch(self, model: Any) -> None:
        spoil_input_gradient(model.conv2, lambda g: torch.cat([g[:, ::2] * 0, g[:, 1::2]], dim=1))


@plants("cnn", "gradient missing")
class BiasGradientMissing(Amp):
    def backward(self) -> None:
        super().backward()
        self.model.output.bias.grad = None


@plants("cnn", "bias sum", invisible="a sum of 32 numbers in 16 bits is hardly worse than rounding each of them")
class BiasSummedIn16Bits(Amp):
    """The last bias's gradient is a running sum in 16 bits."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def summed(grad: Tensor) -> None:
            total = torch.zeros(grad.shape[1], dtype=self.compute_dtype)
            for row in grad.to(self.compute_dtype):
                total += row
            self.total = total.float()

        hook = self.model.output.register_forward_hook(lambda *args: args[2].register_hook(summed) and None)
        loss = super().forward(x, y)
        hook.remove()
        return loss

    def backward(self) -> None:
        super().backward()
        self.model.output.bias.grad.copy_(self.total)


@plants("cnn", "products")
class KernelFlipped(Amp):
    """The kernel's gradient lies the wrong way round."""

    def backward(self) -> None:
        super().backward()
        self.model.conv2.weight.grad = self.model.conv2.weight.grad.flip(2, 3)


@plants("cnn", "loss")
class CnnLossIn16Bits(LossIn16Bits):
    pass


@plants("cnn", "forward pass")
class LabelsOfTheRowBefore(Amp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y.roll(1))


@plants("cnn", "optimizer")
class CnnLayerNotUpdated(NotUpdated):
    layer = "conv2"


@plants("cnn", "no master weights")
class CnnLayerWithoutMasters(RoundedWeights):
    layer = "conv2"


@plants("cnn", "later steps")
class StaleCopiesOfOneLayer(MasterWeights):
    """The 16-bit weights of one layer stay as they were at the start."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.stale = self.model.conv1.weight.detach().clone()  # type: ignore[operator, union-attr]

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        with torch.no_grad():
            self.model.conv1.weight.copy_(self.stale)  # type: ignore[operator, union-attr]
