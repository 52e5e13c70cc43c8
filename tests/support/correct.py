"""Correct implementations that compute otherwise than ``amp``."""

from functools import partial
from unittest import mock

import torch
from support.backends import BACKENDS
from torch import Tensor, nn
from torch.func import functional_call

from mpcompare.backends import scratch
from mpcompare.backends.amp import Amp
from mpcompare.backends.peers.accelerate import AccelerateRow
from mpcompare.backends.peers.fabric import FabricRow
from mpcompare.backends.peers.fsdp2 import Fsdp2
from mpcompare.backends.scratch import Scratch
from mpcompare.contract import Backend, Batches
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.task import Params, Task
from mpcompare.verdict.examine.rounded_operands import MULTIPLY


class PlainProducts(Scratch):
    """``scratch`` whose products are plain fp32 products of widened operands."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale, engine="torch")


class ExplicitCasts(Amp):
    """``amp`` without autocast: weights and inputs of each product are cast by hand, and all else gets fp32."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.multiplied: dict[str, nn.Parameter] = {}
        for name, module in self.model.named_modules():
            own = dict(module.named_parameters(prefix=name, recurse=False))
            if isinstance(module, MULTIPLY):
                self.multiplied |= own
            if own and not isinstance(module, nn.Embedding):
                dtype = self.compute_dtype if isinstance(module, MULTIPLY) else torch.float32
                module.register_forward_pre_hook(partial(_cast, dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = {name: p.to(self.compute_dtype) for name, p in self.multiplied.items()}
        output = functional_call(self.model, weights, (x,), tie_weights=False)
        self.loss = self.task.loss_fn(output.float(), y)
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()


def _cast(dtype: torch.dtype, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(a.to(dtype) for a in args)


class TensorByTensor(Amp):
    """``amp`` whose optimizer updates one tensor after another."""

    foreach = False

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        for group in self.optimizer.param_groups:
            group["foreach"] = self.foreach


class AllTensorsAtOnce(TensorByTensor):
    """``amp`` whose optimizer updates all tensors together, which is not torch's choice on a CPU."""

    foreach = True


class ReversedRows(Amp):
    """``amp`` that takes the rows of each batch from the last to the first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.flip(0), y.flip(0))


class SplitBatch(Amp):
    """``amp`` that computes a batch in four parts, as one does that does not fit into memory."""

    PARTS = 4

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.parts = list(zip(x.tensor_split(self.PARTS), y.tensor_split(self.PARTS), strict=True))
        self.rows, mean = len(x), torch.zeros(())
        with torch.no_grad():
            for part in self.parts:
                mean += super().forward(*part) * (len(part[0]) / self.rows)
        return mean

    def backward(self) -> None:
        for part in self.parts:
            super().forward(*part)
            self.loss = self.loss * (len(part[0]) / self.rows)
            super().backward()


class OtherOrder(Scratch):
    """``scratch`` with the operations of its optimizers in another order, and the norm of one long vector."""

    def clip(self) -> None:
        if self.task.clip_norm is None:
            return
        everything = torch.cat([g.flatten() for g in self.unscaled.values()])
        self.grad_norm = torch.linalg.vector_norm(everything, self.task.clip_norm_type)
        if self.grad_norm + 1e-6 > self.task.clip_norm:
            for g in self.unscaled.values():
                g.mul_(self.task.clip_norm).div_(self.grad_norm + 1e-6)

    def step(self, lr: float | Tensor) -> None:
        with mock.patch.object(scratch, "adam", other_adam), mock.patch.object(scratch, "sgd", other_sgd):
            super().step(lr)


def other_adam(rule: Adam | AdamW, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
    """Adds ``(1 - beta1) (g - m)`` to m, multiplies by the corrections, and subtracts all of the change at once."""
    beta1, beta2 = rule.betas
    if isinstance(rule, Adam):
        g = g + rule.weight_decay * w
    updates = int(remembered["step"].add_(1))
    m = remembered["exp_avg"].lerp_(g, 1 - beta1)
    v = remembered["exp_avg_sq"].lerp_(g.square(), 1 - beta2)
    change = m * (1 / (1 - beta1**updates)) / ((v * (1 / (1 - beta2**updates))).sqrt() + rule.eps)
    if isinstance(rule, AdamW):
        change += rule.weight_decay * w
    w.sub_(change * lr)


def other_sgd(rule: Sgd, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
    """Adds the gradient to the decay of the weight, and takes momentum by one product and one sum."""
    if rule.weight_decay:
        g = (w * rule.weight_decay).add_(g)
    if rule.momentum:
        v = remembered["momentum_buffer"].copy_(remembered["momentum_buffer"] * rule.momentum + g)
        g = g + rule.momentum * v if rule.nesterov else v
    w.sub_(g * lr)


class ClippedTensorByTensor(Amp):
    """``amp`` that clips by ``clip_grad_norm_`` without ``foreach``."""

    def clip(self) -> None:
        if self.task.clip_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(
                self.model.parameters(), self.task.clip_norm, self.task.clip_norm_type, foreach=False
            )


class WholeStep(Scratch):
    """``scratch`` whose step is one piece, and which shows its gradients after they are clipped."""

    def train_step(self, batches: Batches, lr: float | Tensor) -> Tensor:
        loss = torch.zeros(())
        for x, y in batches:
            loss = loss + self.forward(x, y) / len(batches)
            self.backward()
        self.unscale()
        self.clip()
        self.step(lr)
        self.shown = {name: g.clone() for name, g in self.unscaled.items()}
        self.update()
        return loss

    def grads(self) -> Params:
        return self.mlp.named(self.shown)


class FabricByPlugin(FabricRow):
    """Fabric whose precision is a plugin, so that it computes in fp16 on a CPU, too."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale, plugin=True)


CORRECT: dict[str, type[Backend]] = {
    "master_weights": BACKENDS["master_weights"],
    "casts": ExplicitCasts,
    "foreach=False": TensorByTensor,
    "foreach=True": AllTensorsAtOnce,
    "reversed": ReversedRows,
}
CORRECT_MLPS = {"scratch": BACKENDS["scratch"], "fused": BACKENDS["fused"]}
TORCH_MODELS: dict[str, type[Backend]] = {**CORRECT, "clipped tensor by tensor": ClippedTensorByTensor}
BY_HAND: dict[str, type[Backend]] = {
    "scratch": BACKENDS["scratch"],
    "fused": BACKENDS["fused"],
    "plain products": PlainProducts,
    "other order": OtherOrder,
    "whole step": WholeStep,
}
PEERS: dict[str, dict[str, type[Backend]]] = {
    "bf16": {"fabric": FabricRow, "accelerate": AccelerateRow, "fsdp2": Fsdp2},
    "fp16": {"fabric, plugin=true": FabricByPlugin},
}
