"""Planted bugs in the training of an MLP.

Some bugs show only in a precision, in a shape or with a loss scale of one kind: these bugs say where.
"""

from typing import Any
from unittest import mock

import torch
from planted.layers import running_sum
from planted.registry import BF16, FP16, Family
from support.judging import dataset_of
from support.tasks import make_task
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.fused import Fused
from mpcompare.backends.scratch import Scratch, mask_relu_
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.task import Task

DIGITS: dict[str, Any] = {
    "in_features": 784, "hidden": [256], "out_features": 10, "loss": "cross_entropy", "batch_size": 512,
    "samples": 10240, "lr": 0.05,
}  # fmt: skip
SMALL_GRADIENTS = {"in_features": 256, "hidden": [256, 256], "out_features": 256, "loss": "mse", "batch_size": 256}


def make(**changes: Any) -> tuple[Task, Dataset]:
    task = make_task(**{**DIGITS, **changes})
    return task, dataset_of(task)


MLP = Family("mlp", make, steps=20)


# The loss and its gradient.


@MLP.plants("loss", task={"hidden": [32, 32, 32]})
class SoftmaxIn16Bits(Scratch):
    """In a deep network the first logits of all rows are alike, and so are the errors of their losses. The mean of
    unlike errors may be right by luck."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        dtype = self.compute_dtype

        def in_16_bits(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            n = len(logits)
            shifted = (logits - logits.amax(dim=1, keepdim=True)).to(dtype)
            log_probs = shifted - shifted.exp().sum(dim=1, keepdim=True).log()
            rows = torch.arange(n, device=y.device)
            dlogits = log_probs.exp()
            dlogits[rows, y] -= 1
            return -log_probs[rows, y].float().mean(), dlogits.float() / n

        self.loss_of = in_16_bits


@MLP.plants("loss")
class LossIn16Bits(Scratch):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y).to(self.compute_dtype).float()


@MLP.plants("loss", precisions=FP16)
class LabelSmoothed(Scratch):
    """Labels are smoothed by 1e-3. In bf16 a rounding is four times as large, and the bug goes unnoticed."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)

        def smoothed(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = logits.detach().requires_grad_()
            loss = nn.functional.cross_entropy(logits, y, label_smoothing=1e-3)
            (dlogits,) = torch.autograd.grad(loss, logits)
            return loss.detach(), dlogits

        self.loss_of = smoothed


@MLP.plants("gradient scaled")
class MeanTakenTwice(Scratch):
    def backward(self) -> None:
        self.dlogits /= len(self.dlogits)
        super().backward()


@MLP.plants("gradient scaled")
class WrongBatchSize(Scratch):
    def backward(self) -> None:
        n = len(self.dlogits)
        self.dlogits *= n / (n - n // 8)
        super().backward()


@MLP.plants("forward pass")
class LastBiasLeftOut(Scratch):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        last = f"b{len(self.layers)}"
        kept = self.masters[last]
        self.masters[last] = torch.zeros_like(kept)
        loss = super().forward(x, y)
        self.masters[last] = kept
        return loss


# Backward.


@MLP.plants("input gradient")
class MaskFromTheGradient(Scratch):
    def backward(self) -> None:
        with mock.patch("mpcompare.backends.scratch.mask_relu_", lambda dz, z: mask_relu_(dz, dz.clone())):
            super().backward()


@MLP.plants("input gradient")
class MaskLeftOut(Scratch):
    """Every gradient passes, as by a mask of z >= 0."""

    def backward(self) -> None:
        with mock.patch("mpcompare.backends.scratch.mask_relu_", lambda dz, z: dz):
            super().backward()


@MLP.plants("gradient missing")
class BiasGradientMissing(Scratch):
    def backward(self) -> None:
        super().backward()
        self.scaled_grads["b1"].zero_()


@MLP.plants("bias sum")
class BiasSummedIn16Bits(Scratch):
    """The gradient of a bias is a running sum in 16 bits."""

    def backward(self) -> None:
        with mock.patch.object(Tensor, "sum", lambda da, dim: running_sum(da, da.dtype)):
            super().backward()


@MLP.plants("gradient transposed", task={"hidden": [64, 64], "in_features": 64})
class WeightGradientTransposed(Scratch):
    def backward(self) -> None:
        super().backward()
        self.scaled_grads["W2"] = self.scaled_grads["W2"].t().contiguous()


@MLP.plants("products")
class AccumulateIn16Bits(Scratch):
    """Sums of 16 products are fp32, and the sum of these sums has 16 bits."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)

        def gemm(
            a: Tensor, b: Tensor, out: Tensor, trans_a: bool = False, trans_b: bool = False, beta: float = 0.0
        ) -> None:
            a, b = (a.t() if trans_a else a), (b.t() if trans_b else b)
            if beta == 0:
                out.zero_()
            for k in range(0, a.shape[1], 16):
                out.add_((a[:, k : k + 16].float() @ b[k : k + 16].float()).to(out.dtype))

        self.gemm = gemm  # type: ignore[assignment]


@MLP.plants("later steps", precisions=BF16)
class GradientsPileUp(Amp):
    """zero_grad() is forgotten. With GradScaler it goes unnoticed: old gradients are divided by the scale once more."""

    def update(self) -> None:
        self.scaler.update(self.static_scale)


# Loss scaling and the skip.


class RescaledGradients(Scratch):
    """``scratch`` that multiplies its gradients by ``factor`` once they are unscaled."""

    def factor(self) -> float:
        raise NotImplementedError

    def unscale(self) -> None:
        super().unscale()
        for g in self.unscaled.values():
            g *= self.factor()


@MLP.plants("loss scale", precisions=FP16)
class NoLossScaling(Scratch):
    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, NoLossScale())


@MLP.plants("underflow", precisions=FP16, task=SMALL_GRADIENTS)
class NotScaledAtAll(RescaledGradients):
    """It says that it scales, but neither multiplies nor divides."""

    def backward(self) -> None:
        self.dlogits /= self.scaling.scale
        super().backward()

    def factor(self) -> float:
        return self.scaling.scale


@MLP.plants("underflow", precisions=FP16, task=SMALL_GRADIENTS)
class UnscaledIn16Bits(Scratch):
    def unscale(self) -> None:
        self.found_inf = self.scaling.found_inf(self.scaled_grads.values())
        self.observed["gradients"] = self.scaled_grads["W1"].dtype
        inv_scale = self.scaling.inv_scale
        self.unscaled = {name: self.scaled_grads.pop(name).mul_(inv_scale).float() for name in self.masters}


@MLP.plants("gradient scaled", precisions=FP16)
class UnscaledTwice(RescaledGradients):
    def factor(self) -> float:
        return self.scaling.inv_scale


@MLP.plants("gradient scaled", precisions=FP16)
class NotUnscaled(RescaledGradients):
    def factor(self) -> float:
        return self.scaling.scale


@MLP.plants("overflow", precisions=FP16)
class ScaledTwiceRemovedTwice(RescaledGradients):
    def backward(self) -> None:
        self.dlogits *= self.scaling.scale
        super().backward()

    def factor(self) -> float:
        return self.scaling.inv_scale


@MLP.plants("skip", precisions=FP16)
class NeverSkips(Scratch):
    def step(self, lr: float | Tensor) -> None:
        found_inf, self.found_inf = self.found_inf, False
        super().step(lr)
        self.found_inf = found_inf


@MLP.plants("skip", precisions=FP16)
class OnlyFirstLayerSearchedForInf(Scratch):
    def unscale(self) -> None:
        all_grads = self.scaled_grads
        self.scaled_grads = {name: all_grads[name] for name in ("W1", "b1")}
        self.found_inf = self.scaling.found_inf(self.scaled_grads.values())
        found_inf, self.scaled_grads = self.found_inf, all_grads
        super().unscale()
        self.found_inf = found_inf


@MLP.plants("skip", precisions=FP16, invisible="where a bias's gradient overflows, so does a weight's at this task")
class BiasNotSearchedForInf(Scratch):
    def unscale(self) -> None:
        biases = {name: g for name, g in self.scaled_grads.items() if name[0] == "b"}
        for name in biases:
            self.scaled_grads[name] = biases[name].nan_to_num(0, 0, 0)
        super().unscale()
        inv_scale = self.scaling.inv_scale
        self.unscaled.update({name: g.float() * inv_scale for name, g in biases.items()})


@MLP.plants("loss scale", precisions=FP16)
class GrowthOneStepLate(Scratch):
    def update(self) -> None:
        if isinstance(self.scaling, DynamicLossScale) and self.scaling.growth_tracker == 0 and not self.found_inf:
            self.late = not getattr(self, "late", False)
            if self.late:
                del self.unscaled
                return
        super().update()


@MLP.plants("loss scale", precisions=FP16)
class TrackerKeptAfterOverflow(Scratch):
    def update(self) -> None:
        tracker, found_inf = getattr(self.scaling, "growth_tracker", 0), self.found_inf
        super().update()
        if found_inf:
            self.scaling.growth_tracker = tracker  # type: ignore[union-attr]


@MLP.plants("loss scale", precisions=FP16)
class NeverBacksOff(Scratch):
    def update(self) -> None:
        self.found_inf = False
        super().update()


@MLP.plants("after a skip", precisions=FP16)
class CopiesUpdatedInASkippedStep(Fused):
    """The masters are left alone, and the compute copies are not."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        if self.skipped:
            for copy in self.params.values():
                copy.mul_(0.5)


# The update.


@MLP.plants("no master weights")
class NoMasterWeights(Scratch):
    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.masters = {name: p.to(self.compute_dtype).float() for name, p in self.masters.items()}

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        for master in self.masters.values():
            master.copy_(master.to(self.compute_dtype))


@MLP.plants("optimizer")
class UpdatedTwice(Scratch):
    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        super().step(lr)


@MLP.plants("momentum", task={"momentum": 0.9})
class MomentumDampened(Scratch):
    """``v = momentum v + (1 - momentum) g`` from the second step on."""

    def step(self, lr: float | Tensor) -> None:
        if getattr(self, "later", False):
            for g in self.unscaled.values():
                g *= 1 - self.optimizer.momentum
        super().step(lr)
        if getattr(self, "later", False):
            for g in self.unscaled.values():
                g /= 1 - self.optimizer.momentum
        self.later = getattr(self, "later", False) or not self.skipped


@MLP.plants("optimizer")
class LearningRateIn16Bits(Scratch):
    def step(self, lr: float | Tensor) -> None:
        super().step(torch.tensor(lr, dtype=self.compute_dtype).item())


# Weights and precision.


@MLP.plants("later steps")
class StaleCopies(Fused):
    """The compute copies stay what they were at the start."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.stale = {name: copy.clone() for name, copy in self.params.items()}
        return super().forward(x, y)

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        for name, copy in self.params.items():
            copy.copy_(self.stale[name])


@MLP.plants("precision")
class ComputesInBf16(Scratch):
    """It computes in bf16 where fp16 was asked for, and in fp16 where bf16 was."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, "bf16" if precision == "fp16" else "fp16", loss_scale)


@MLP.plants("precision")
class ComputesInFp32(Scratch):
    """It computes in FP32 where a 16-bit precision was asked for, without a word."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, "fp32", loss_scale)


@MLP.plants("precision")
class SaysItIsWhatWasAskedFor(ComputesInFp32):
    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.asked_for = precision

    def dtypes(self) -> dict[str, str]:
        return {**super().dtypes(), "activations": self.asked_for, "gradients": self.asked_for}
