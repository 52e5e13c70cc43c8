"""Random optimizers, schedules, clips and accumulations with correct implementations: none may be accused."""

import random
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from support.backends import BACKENDS
from support.correct import CORRECT, Case, PlainProducts, part
from torch import Tensor, nn

from mpcompare.backends import scratch
from mpcompare.backends.amp import Amp
from mpcompare.backends.scratch import Scratch
from mpcompare.contract import Backend, Batches
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits, synthetic
from mpcompare.tasks.data.text import ALPHABET, topics
from mpcompare.tasks.images import MnistCnn
from mpcompare.tasks.mlp import Mlp
from mpcompare.tasks.optimizers import Adam, AdamW, Optimizer, Sgd
from mpcompare.tasks.schedules import Constant, Cosine, Schedule, Warmup
from mpcompare.tasks.task import Params, Task
from mpcompare.tasks.text import CharGpt, CharLstm


class OtherOrder(Scratch):
    """Optimizers whose operations stand in another order, and a norm of one long vector."""

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
    """``m = m + (1 - beta1) (g - m)``, corrections that are multiplied with, one subtraction for all of the change."""
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
    """The decay of the weight first, then momentum by one product and one sum."""
    if rule.weight_decay:
        g = (w * rule.weight_decay).add_(g)
    if rule.momentum:
        v = remembered["momentum_buffer"].copy_(remembered["momentum_buffer"] * rule.momentum + g)
        g = g + rule.momentum * v if rule.nesterov else v
    w.sub_(g * lr)


class ClippedTensorByTensor(Amp):
    """``clip_grad_norm_`` without ``foreach``."""

    def clip(self) -> None:
        if self.task.clip_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(
                self.model.parameters(), self.task.clip_norm, self.task.clip_norm_type, foreach=False
            )


class WholeStep(Scratch):
    """One piece, which shows its gradients after they are clipped."""

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


TORCH_MODELS: dict[str, type[Backend]] = {**CORRECT, "clipped tensor by tensor": ClippedTensorByTensor}
BY_HAND: dict[str, type[Backend]] = {
    "scratch": BACKENDS["scratch"],
    "fused": BACKENDS["fused"],
    "plain products": PlainProducts,
    "other order": OtherOrder,
    "whole step": WholeStep,
}


def random_optimizer(draw: random.Random) -> Optimizer:
    decay = draw.choice([0.0, 1e-4, 0.01, 0.1])
    kind = draw.choice(["sgd", "momentum", "nesterov", "adam", "adamw"])
    if kind in ("adam", "adamw"):
        betas = draw.choice([(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.0, 0.99), (0.9, 0.0)])
        return (Adam if kind == "adam" else AdamW)(
            draw.choice([1e-4, 1e-3, 1e-2]), betas, draw.choice([1e-8, 1e-6]), decay
        )
    momentum = 0.0 if kind == "sgd" else draw.choice([0.5, 0.9])
    return Sgd(draw.choice([0.001, 0.05, 0.3]), momentum, kind == "nesterov", decay)


def random_schedule(draw: random.Random) -> Schedule:
    warmup = draw.randint(0, 6)
    return draw.choice([Constant(), Warmup(draw.randint(1, 10)), Cosine(None, warmup, draw.choice([0.0, 0.1]))])


def random_network(draw: random.Random, seed: int) -> tuple[str, Callable[[], nn.Module], str, Dataset]:
    """Its family, how it is made, its loss and its data."""
    family = draw.choice(["mlp", "mlp", "mlp", "mlp", "cnn", "cnn", "lstm", "gpt"])
    loss = "cross_entropy"
    if family == "cnn":
        return family, partial(MnistCnn, draw.choice([2, 4])), loss, digits(seed, 640)
    if family == "lstm":
        width = draw.choice([8, 24])
        return family, partial(CharLstm, len(ALPHABET), width, 1), loss, part(topics(seed, 16), 640)
    if family == "gpt":
        length, heads = draw.choice([8, 16]), draw.choice([1, 2])
        model = partial(CharGpt, len(ALPHABET), length, heads * 8, heads, draw.choice([1, 2]), draw.random() < 0.3)
        return family, model, loss, part(topics(seed, length), 640)
    loss, inputs, outputs = draw.choice([loss, "mse"]), draw.choice([5, 32, 100]), draw.choice([2, 10, 33])
    hidden = [draw.choice([3, 16, 64, 200]) for _ in range(draw.randint(0, 3))]
    return family, partial(Mlp, inputs, hidden, outputs), loss, synthetic(seed, 2000, inputs, outputs, loss)


def recipe_case(seed: int, precision: str) -> Case:
    """Convolutions and recurrent layers are slow in fp16 on a CPU, or are not there: those are in bf16."""
    draw = random.Random(seed)
    family, model, loss, dataset = random_network(draw, seed)
    task = Task(
        model,
        loss,
        random_optimizer(draw),
        draw.choice([16, 32, 64]),
        2000,
        schedule=random_schedule(draw),
        accumulate=draw.choice([1, 1, 2, 4]),
        clip_norm=draw.choice([None, 0.01, 0.3, 1.0, 100.0]),
        clip_norm_type=draw.choice([2.0, 2.0, float("inf")]),
    )
    precision = "bf16" if family in ("cnn", "lstm") else precision
    backends = {**BY_HAND, **TORCH_MODELS} if family == "mlp" else TORCH_MODELS
    return Case(task, dataset, precision, seed, draw.choice([12, 12, 30]), backends)
