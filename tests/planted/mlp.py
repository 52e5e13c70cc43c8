"""Planted bugs: each a small patch of a correct backend, with the cause that the verdict should name.

Some show only in a precision, a shape or with a policy: those say where.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.fused import Fused
from mpcompare.backends.scratch import Scratch, mask_relu_
from mpcompare.contract import Backend
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale
from mpcompare.tasks.task import Task


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    Attributes:
        cause: what the verdict should call it.
        precisions: those in which it is a bug at all.
        invisible: why no check can see it at this task; empty if one can.
        task: what the task must be for the bug to exist.
    """

    backend: type[Backend]
    cause: str
    precisions: tuple[str, ...] = ("fp16", "bf16")
    invisible: str = ""
    task: dict[str, Any] | None = None


MUTANTS: dict[str, Mutant] = {}


def plants(cause: str, **where: Any) -> Callable[[type[Backend]], type[Backend]]:
    def register(backend: type[Backend]) -> type[Backend]:
        MUTANTS[backend.__name__] = Mutant(backend, cause, **where)
        return backend

    return register


FP16 = ("fp16",)
SMALL_GRADIENTS = {"in_features": 256, "hidden": [256, 256], "out_features": 256, "loss": "mse", "batch_size": 256}


# The loss and its gradient.


@plants("loss")
class SoftmaxIn16Bits(Scratch):
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


@plants("loss")
class LossIn16Bits(Scratch):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y).to(self.compute_dtype).float()


@plants("loss", precisions=("fp16",))
class LabelSmoothed(Scratch):
    """By 1e-3: in bf16, where a rounding is four times that, it goes unnoticed."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)

        def smoothed(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = logits.detach().requires_grad_()
            loss = nn.functional.cross_entropy(logits, y, label_smoothing=1e-3)
            (dlogits,) = torch.autograd.grad(loss, logits)
            return loss.detach(), dlogits

        self.loss_of = smoothed


@plants("gradient scaled")
class MeanTakenTwice(Scratch):
    def backward(self) -> None:
        self.dlogits /= len(self.dlogits)
        super().backward()


@plants("gradient scaled")
class WrongBatchSize(Scratch):
    def backward(self) -> None:
        n = len(self.dlogits)
        self.dlogits *= n / (n - n // 8)
        super().backward()


@plants("forward pass")
class LastBiasLeftOut(Scratch):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        last = f"b{len(self.layers)}"
        kept = self.masters[last]
        self.masters[last] = torch.zeros_like(kept)
        loss = super().forward(x, y)
        self.masters[last] = kept
        return loss


# Backward.


@plants("input gradient")
class MaskFromTheGradient(Scratch):
    def backward(self) -> None:
        with mock.patch("mpcompare.backends.scratch.mask_relu_", lambda dz, z: mask_relu_(dz, dz.clone())):
            super().backward()


@plants("input gradient")
class MaskLeftOut(Scratch):
    """As z >= 0 would be."""

    def backward(self) -> None:
        with mock.patch("mpcompare.backends.scratch.mask_relu_", lambda dz, z: dz):
            super().backward()


@plants("gradient missing")
class BiasGradientMissing(Scratch):
    def backward(self) -> None:
        super().backward()
        self.scaled_grads["b1"].zero_()


@plants("bias sum")
class BiasSummedIn16Bits(Scratch):
    """A running sum in 16 bits."""

    def backward(self) -> None:
        def in_16_bits(da: Tensor, dim: int) -> Tensor:
            total = torch.zeros(da.shape[1], dtype=da.dtype)
            for row in da:
                total += row
            return total

        with mock.patch.object(Tensor, "sum", in_16_bits):
            super().backward()


@plants("gradient transposed", task={"hidden": [64, 64], "in_features": 64})
class WeightGradientTransposed(Scratch):
    def backward(self) -> None:
        super().backward()
        self.scaled_grads["W2"] = self.scaled_grads["W2"].t().contiguous()


@plants("products")
class AccumulateIn16Bits(Scratch):
    """Sums of 16 products in fp32, these in 16 bits."""

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


@plants("later steps", precisions=("bf16",))
class GradientsPileUp(Amp):
    """zero_grad() is forgotten. With GradScaler it goes unnoticed: what piles up is divided by the scale once more."""

    def update(self) -> None:
        self.scaler.update(self.static_scale)


# Loss scaling and the skip.


@plants("loss scale", precisions=FP16)
class NoLossScaling(Scratch):
    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, NoLossScale())


@plants("underflow", precisions=FP16, task=SMALL_GRADIENTS)
class NotScaledAtAll(Scratch):
    """It says that it scales, but neither multiplies nor divides."""

    def backward(self) -> None:
        self.dlogits /= self.scaling.scale
        super().backward()

    def unscale(self) -> None:
        super().unscale()
        for g in self.unscaled.values():
            g *= self.scaling.scale


@plants("underflow", precisions=FP16, task=SMALL_GRADIENTS)
class UnscaledIn16Bits(Scratch):
    def unscale(self) -> None:
        self.found_inf = self.scaling.found_inf(self.scaled_grads.values())
        self.observed["gradients"] = self.scaled_grads["W1"].dtype
        inv_scale = self.scaling.inv_scale
        self.unscaled = {name: self.scaled_grads.pop(name).mul_(inv_scale).float() for name in self.masters}


@plants("gradient scaled", precisions=FP16)
class UnscaledTwice(Scratch):
    def unscale(self) -> None:
        super().unscale()
        for g in self.unscaled.values():
            g *= self.scaling.inv_scale


@plants("gradient scaled", precisions=FP16)
class NotUnscaled(Scratch):
    def unscale(self) -> None:
        super().unscale()
        for g in self.unscaled.values():
            g *= self.scaling.scale


@plants("overflow", precisions=FP16)
class ScaledTwiceRemovedTwice(Scratch):
    def backward(self) -> None:
        self.dlogits *= self.scaling.scale
        super().backward()

    def unscale(self) -> None:
        super().unscale()
        for g in self.unscaled.values():
            g *= self.scaling.inv_scale


@plants("skip", precisions=FP16)
class NeverSkips(Scratch):
    def step(self, lr: float | Tensor) -> None:
        found_inf, self.found_inf = self.found_inf, False
        super().step(lr)
        self.found_inf = found_inf


@plants("skip", precisions=FP16)
class OnlyFirstLayerSearchedForInf(Scratch):
    def unscale(self) -> None:
        all_grads = self.scaled_grads
        self.scaled_grads = {name: all_grads[name] for name in ("W1", "b1")}
        self.found_inf = self.scaling.found_inf(self.scaled_grads.values())
        found_inf, self.scaled_grads = self.found_inf, all_grads
        super().unscale()
        self.found_inf = found_inf


@plants("skip", precisions=FP16, invisible="where a bias's gradient overflows, so does a weight's at this task")
class BiasNotSearchedForInf(Scratch):
    def unscale(self) -> None:
        biases = {name: g for name, g in self.scaled_grads.items() if name[0] == "b"}
        for name in biases:
            self.scaled_grads[name] = biases[name].nan_to_num(0, 0, 0)
        super().unscale()
        inv_scale = self.scaling.inv_scale
        self.unscaled.update({name: g.float() * inv_scale for name, g in biases.items()})


@plants("loss scale", precisions=FP16)
class GrowthOneStepLate(Scratch):
    def update(self) -> None:
        if isinstance(self.scaling, DynamicLossScale) and self.scaling.growth_tracker == 0 and not self.found_inf:
            self.late = not getattr(self, "late", False)
            if self.late:
                del self.unscaled
                return
        super().update()


@plants("loss scale", precisions=FP16)
class TrackerKeptAfterOverflow(Scratch):
    def update(self) -> None:
        tracker, found_inf = getattr(self.scaling, "growth_tracker", 0), self.found_inf
        super().update()
        if found_inf:
            self.scaling.growth_tracker = tracker  # type: ignore[union-attr]


@plants("loss scale", precisions=FP16)
class NeverBacksOff(Scratch):
    def update(self) -> None:
        self.found_inf = False
        super().update()


@plants("after a skip", precisions=FP16)
class CopiesUpdatedInASkippedStep(Fused):
    """The masters are left alone, and the compute copies are not."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        if self.skipped:
            for copy in self.params.values():
                copy.mul_(0.5)


# The update.


@plants("no master weights")
class NoMasterWeights(Scratch):
    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.masters = {name: p.to(self.compute_dtype).float() for name, p in self.masters.items()}

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        for master in self.masters.values():
            master.copy_(master.to(self.compute_dtype))


@plants("optimizer")
class UpdatedTwice(Scratch):
    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        super().step(lr)


@plants("momentum", task={"momentum": 0.9})
class MomentumDampened(Scratch):
    """v = momentum v + (1 - momentum) g, from the second step on."""

    def step(self, lr: float | Tensor) -> None:
        if getattr(self, "later", False):
            for g in self.unscaled.values():
                g *= 1 - self.rule.momentum
        super().step(lr)
        if getattr(self, "later", False):
            for g in self.unscaled.values():
                g /= 1 - self.rule.momentum
        self.later = getattr(self, "later", False) or not self.skipped


@plants("optimizer")
class LearningRateIn16Bits(Scratch):
    def step(self, lr: float | Tensor) -> None:
        super().step(torch.tensor(lr, dtype=self.compute_dtype).item())


# Which weights, which precision.


@plants("later steps")
class StaleCopies(Fused):
    """The compute copies stay what they were at the start."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.stale = {name: copy.clone() for name, copy in self.params.items()}
        return super().forward(x, y)

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        for name, copy in self.params.items():
            copy.copy_(self.stale[name])


@plants("precision")
class ComputesInBf16(Scratch):
    """bf16 where fp16 was asked for, and fp16 where bf16 was."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, "bf16" if precision == "fp16" else "fp16", loss_scale)


@plants("precision")
class ComputesInFp32(Scratch):
    """FP32 where a 16-bit precision was asked for, without a word."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, "fp32", loss_scale)


@plants("precision")
class SaysItIsWhatWasAskedFor(ComputesInFp32):
    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.asked_for = precision

    def dtypes(self) -> dict[str, str]:
        return {**super().dtypes(), "activations": self.asked_for, "gradients": self.asked_for}
