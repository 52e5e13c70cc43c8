"""Bugs that a network of any layers can have; each family plants them in layers of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.contract import Backend
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Task


def variant(base: type[Backend], **attributes: Any) -> type[Backend]:
    """Returns ``base`` with attributes of its own: the layer that has the bug, say."""
    return type(base.__name__, (base,), attributes)


class Patched(Amp):
    """``amp`` whose copy of the network is changed by ``patch``."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.patch(self.model)

    def patch(self, model: Any) -> None:
        raise NotImplementedError


class _WrongGradient(torch.autograd.Function):
    """The identity, which passes back ``wrong`` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.wrong = wrong
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.wrong(grad), None


class WrongInputGradient(Patched):
    """``layer`` passes down ``wrong`` of its gradient."""

    layer = ""

    def patch(self, model: Any) -> None:
        layer = model.get_submodule(self.layer)
        layer.register_forward_pre_hook(lambda _, args: (_WrongGradient.apply(args[0], self.wrong), *args[1:]))

    def wrong(self, g: Tensor) -> Tensor:
        raise NotImplementedError


class GradientMissing(Amp):
    """``parameter`` has no gradient."""

    parameter = ""

    def backward(self) -> None:
        super().backward()
        self.model.get_parameter(self.parameter).grad = None


class WrongEps(Patched):
    """``norm`` adds 0.1 to the variance."""

    norm = ""

    def patch(self, model: Any) -> None:
        model.get_submodule(self.norm).eps = 0.1


def running_sum(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum of ``rows`` ``[n, m]``, taken row after row in ``dtype``."""
    total = torch.zeros(rows.shape[1], dtype=dtype)
    for row in rows.to(dtype):
        total += row
    return total


class _Lookup(torch.autograd.Function):
    """``weight[ids]``, whose gradient is a running sum in bf16."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.bfloat16)
        for token, g in zip(ids.flatten().tolist(), grad.flatten(0, 1).bfloat16(), strict=True):
            total[token] += g
        return total.float(), None


class EmbeddingSummedIn16Bits(Patched):
    """Each token's gradients are added one after another in 16 bits."""

    def patch(self, model: Any) -> None:
        model.embedding.forward = lambda ids: _Lookup.apply(model.embedding.weight, ids)


class LabelsShifted(Amp):
    """Each label is the character after the next."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y.roll(-1, dims=1))


class LossIn16Bits(Amp):
    """Softmax and loss are computed from the 16-bit logits in 16 bits."""

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
    """``layer`` keeps its weights."""

    layer = ""

    def step(self, lr: float | Tensor) -> None:
        kept = {p: p.detach().clone() for p in self.model.get_submodule(self.layer).parameters()}
        super().step(lr)
        with torch.no_grad():
            for p, value in kept.items():
                p.copy_(value)


class RoundedWeights(Amp):
    """``layer`` has no master weights: its weights are rounded to 16 bits after each step."""

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
