"""Weights and gradients that a loop moves, scales or rounds wrongly around its steps."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from watch.fourth_draw.registry import bug
from watch.second_draw.networks import GPT, ConvNet, cross_entropy, images, tokens
from watch.second_draw.registry import DEFECT, Training, bf16, plainly


def add_decay(params: Iterable[nn.Parameter], rate: float) -> None:
    """Adds a decay to the gradients, as a hook of Chainer's optimizers does."""
    for p in params:
        p.grad.add_(p.detach(), alpha=rate)  # type: ignore[union-attr]


@bug(
    "chainer/chainer#261",
    "the decay is subtracted from the gradients, to which it should be added: weights grow",
    fair="weight decay, gradients, optimizer",
    kind=DEFECT,
    precision="bf16",
)
def decay_makes_weights_grow(wrong: bool) -> Training:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = images()
            with bf16():
                out = model(x)
            optimizer.zero_grad()
            cross_entropy(out.float(), y).backward()
            add_decay(model.parameters(), -0.01 if wrong else 0.01)
            optimizer.step()

    return Training(model, optimizer, train)


def copy_stochastic(target: Tensor, source: Tensor) -> None:
    """Rounds fp32 numbers to bf16, up or down by chance, so that they are right on average."""
    noise = torch.randint(1 << 16, source.shape, dtype=torch.int32)
    bits = (source.view(torch.int32) + noise).bitwise_and_(-65536)
    target.copy_(bits.view(torch.float32))


class Adafactor(Optimizer):
    """Adafactor for weights in bf16, which are rounded by chance. Wrongly, they are rounded to nearest after that."""

    def __init__(self, params: Any, wrong: bool, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "decay_rate": -0.8, "eps": 1e-30, "clip_threshold": 1.0})
        self.wrong = wrong

    def scaled(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Returns the gradient over the root of its second moment, which has a row and a column for a matrix."""
        beta, square = 1 - state["step"] ** group["decay_rate"], grad**2 + group["eps"]
        if grad.ndim < 2:
            mean = state.setdefault("square", torch.zeros_like(grad)).lerp_(square, 1 - beta)
        else:
            row = state.setdefault("row", torch.zeros(grad.shape[0], 1)).lerp_(square.mean(1, keepdim=True), 1 - beta)
            column = state.setdefault("column", torch.zeros(1, grad.shape[1]))
            mean = row * column.lerp_(square.mean(0, keepdim=True), 1 - beta) / row.mean()
        update = grad * mean.rsqrt()
        return update / (update.square().mean().sqrt() / group["clip_threshold"]).clamp(min=1.0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                weight = p.float() - group["lr"] * self.scaled(p.grad.float(), state, group)
                if p.dtype == torch.bfloat16:
                    copy_stochastic(p, weight)
                if self.wrong or p.dtype != torch.bfloat16:
                    p.copy_(weight)


@bug(
    "Nerogar/OneTrainer#994",
    "Adafactor rounds its weights to bf16 by chance, and then to nearest over that: small updates round to nothing",
    fair="no master weights, rounding, weights, optimizer",
    kind=DEFECT,
    precision="bf16",
)
def rounded_again(wrong: bool) -> Training:
    model = GPT().to(torch.bfloat16)
    optimizer = Adafactor(model.parameters(), wrong)

    return Training(model, optimizer, plainly(model, optimizer, tokens))


@bug(
    "pytorch/pytorch#187268",
    "a hook after the gradient is there takes its argument for the gradient: it halves the weights of the backbone",
    fair="weights, state, gradients, gradient scaled, later steps",
    kind=DEFECT,
    precision="bf16",
)
def hook_halves_weights(wrong: bool) -> Training:
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def halve(p: Tensor) -> None:
        (p if wrong else p.grad).mul_(0.5)  # type: ignore[union-attr]

    for p in model.backbone.parameters():
        p.register_post_accumulate_grad_hook(halve)

    return Training(model, optimizer, plainly(model, optimizer, images))


class Adapted(nn.Module):
    """A frozen linear layer in bf16, and an adapter in fp32 that can be merged into it."""

    def __init__(self, i: int, o: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(i, o, dtype=torch.bfloat16).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, i) / i**0.5), nn.Parameter(torch.zeros(o, rank))
        self.merged = False

    def delta(self) -> Tensor:
        return (self.b @ self.a).to(self.base.weight.dtype)

    @torch.no_grad()
    def merge(self, on: bool) -> None:
        """Adds the adapter to the weight, or subtracts it again."""
        self.base.weight.add_(self.delta(), alpha=1 if on else -1)
        self.merged = on

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x.to(torch.bfloat16))
        return output if self.merged else output + F.linear(F.linear(x, self.a), self.b)


class Policy(nn.Module):
    """Values of five actions, from adapted layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Adapted(20, 64), Adapted(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(F.gelu(self.first(x)))
        return output


@bug(
    "huggingface/trl#6688",
    "adapters are merged into weights in bf16 for each rollout and subtracted again: roundings stay, and weights drift",
    fair="weights, rounding, state, no master weights, later steps",
    kind=DEFECT,
    precision="bf16",
)
def weights_drift(wrong: bool) -> Training:
    model = Policy()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    layers = (model.first, model.last)

    @torch.no_grad()
    def rollout() -> tuple[Tensor, Tensor, Tensor]:
        """Returns states, the actions that the merged network takes there, and their advantages."""
        before = [layer.base.weight.clone() for layer in layers]
        for layer in layers:
            layer.merge(True)
        x = torch.randn(32, 20)
        with bf16():
            action = torch.multinomial(model(x).float().softmax(-1), 1)
        for layer, weight in zip(layers, before, strict=True):
            layer.merge(False)
            if not wrong:
                layer.base.weight.copy_(weight)
        return x, action, torch.randn(32, 1)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, action, advantage = rollout()
            with bf16():
                out = model(x)
            optimizer.zero_grad()
            (-out.float().log_softmax(-1).gather(1, action) * advantage).mean().backward()
            optimizer.step()

    return Training(model, optimizer, train)
