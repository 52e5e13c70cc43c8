"""The pretraining loop of nanoGPT: batches ahead, accumulation, unscale, clip, a cosine that is set by hand."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from watch.loops.base import Loop, published, set_rate
from watch.loops.networks import GPT


@published
class NanoGPT(Loop):
    """nanoGPT with autocast on a CPU. The published loop has none there."""

    name = "nanoGPT"
    where = "https://github.com/karpathy/nanoGPT/blob/master/train.py"
    micro_batches = 4
    clip_norm = 1.0
    rows, length, words, dropout = 4, 24, 64, 0.1
    rate, warm_up, decay_until, least_rate = 1e-3, 2, 30, 1e-4
    evaluated_every = 3

    def make_model(self) -> nn.Module:
        return GPT(self.words, self.length, dropout=self.dropout)

    def make_optimizer(self) -> Optimizer:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=self.rate, betas=(0.9, 0.95))

    def rate_of(self, iteration: int) -> float:
        """Returns the learning rate: a warm-up, then half a cosine, then the least rate."""
        if iteration < self.warm_up:
            return self.rate * (iteration + 1) / (self.warm_up + 1)
        if iteration > self.decay_until:
            return self.least_rate
        done = (iteration - self.warm_up) / (self.decay_until - self.warm_up)
        return self.least_rate + 0.5 * (1.0 + math.cos(math.pi * done)) * (self.rate - self.least_rate)

    def batch(self) -> tuple[Tensor, Tensor]:
        text = (self.integers(self.words, self.rows, self.length + 1) ** 2) // self.words  # small numbers are frequent
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    @torch.no_grad()
    def estimate_loss(self) -> float:
        self.model.eval()
        losses = torch.zeros(2)
        for number in range(2):
            x, y = self.batch()
            with self.autocast():
                _, loss = self.model(x, y)
            losses[number] = loss.item()
        self.model.train()
        return losses.mean().item()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with self.autocast():
            _, loss = self.model(x, y)
            return loss / self.micro_batches

    def train(self, updates: int) -> None:
        x, y = self.batch()
        for iteration in range(updates):
            set_rate(self.optimizer, self.rate_of(iteration))
            if iteration % self.evaluated_every == 0:
                self.estimate_loss()
            for _ in range(self.micro_batches):
                loss = self.forward(x, y)
                x, y = self.batch()
                self.scaler.scale(loss).backward()
            if self.clip_norm:
                self.scaler.unscale_(self.optimizer)
                self.clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)


@published
class NanoGPTOnACpu(NanoGPT):
    """nanoGPT as published: on a CPU it has no autocast, whatever dtype was asked for."""

    name = "nanoGPT, as it is on a CPU"
    precisions = ("bf16",)
    computes = "fp32"

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()


@published
class NanoGPTCompiled(NanoGPT):
    """nanoGPT with ``compile=True``, by the backend of torch that compiles no code, and without dropout.

    The layers within a compiled module are not seen, nor is their precision.
    """

    name = "nanoGPT, compiled"
    precisions = ("bf16",)
    dropout = 0.0

    def make_model(self) -> nn.Module:
        torch.compiler.reset()
        compiled: Any = torch.compile(super().make_model(), backend="aot_eager")
        return compiled

    @property
    def trained(self) -> nn.Module:
        model: nn.Module = self.model._orig_mod
        return model

    @classmethod
    def meant(cls, precision: str) -> dict[str, Any]:
        return {"autocast": precision, "clip_norm": cls.clip_norm}
