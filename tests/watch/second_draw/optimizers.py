"""Optimizers that have a rule of their own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from watch.second_draw.networks import GPT, MLP, ConvNet, cross_entropy, images, rows, tokens
from watch.second_draw.registry import DEFECT, Training, bf16, bug, plainly


class Muon(Optimizer):
    """Muon for matrices, and momentum alone for all other parameters."""

    decays_all = False

    def __init__(self, params: Any, lr: float = 0.02, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    if not self.decays_all:
                        continue
                    p.grad = torch.zeros_like(p)
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])
                if update.ndim == 2:
                    update = self.orthogonal(update) * max(1, p.size(-2) / p.size(-1)) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    @staticmethod
    def orthogonal(update: Tensor) -> Tensor:
        x = update / (update.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.t()
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        return x


class MuonDecaysAll(Muon):
    decays_all = True


class Branches(nn.Module):
    """A body and two heads. One head is used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = MLP(20, 64, 32), nn.ModuleList(nn.Linear(32, 5) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        output: Tensor = self.heads[which](torch.relu(self.body(x)))
        return output


@bug(
    "KellerJordan/Muon#54",
    "parameters without a gradient are given one of 0, and decay",
    fair="unused parameter, weight decay",
    kind=DEFECT,
    precision="bf16",
)
def decays_unused(wrong: bool) -> Training:
    model = Branches()
    optimizer = (MuonDecaysAll if wrong else Muon)(model.parameters())

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = rows()
            with bf16():
                out = model(x, 0)
            optimizer.zero_grad()
            cross_entropy(out.float(), y).backward()
            optimizer.step()

    return Training(model, optimizer, train)


class AdamOfMlx(Optimizer):
    """AdamW, as MLX writes it."""

    corrected, times_lr = False, True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].mul_(b1).add_(p.grad, alpha=1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                c1, c2 = (1 - b1 ** state["step"], 1 - b2 ** state["step"]) if self.corrected else (1.0, 1.0)
                p.mul_(1 - (group["lr"] if self.times_lr else 1.0) * group["weight_decay"])
                root = (state["exp_avg_sq"].sqrt() / c2**0.5).add_(group["eps"])
                p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / c1)


class AdamW(AdamOfMlx):
    pass


class AdamWCorrected(AdamOfMlx):
    corrected = True


class AdamWRawDecay(AdamOfMlx):
    corrected, times_lr = True, False


for each in (AdamWCorrected, AdamWRawDecay):
    each.__name__ = each.__qualname__ = "AdamW"  # all three say that they are AdamW


@bug(
    "ml-explore/mlx#1640",
    "an AdamW without bias correction",
    fair="bias correction, optimizer",
    kind=DEFECT,
    precision="bf16",
)
def no_bias_correction(wrong: bool) -> Training:
    model = GPT()
    optimizer = (AdamW if wrong else AdamWCorrected)(model.parameters(), lr=1e-3, weight_decay=0.01)

    return Training(model, optimizer, plainly(model, optimizer, tokens))


@bug(
    "FluxML/Optimisers.jl#182",
    "the decay of an AdamW is not multiplied by the learning rate",
    fair="weight decay, optimizer",
    kind=DEFECT,
    precision="bf16",
)
def decay_without_rate(wrong: bool) -> Training:
    model = ConvNet()
    optimizer = (AdamWRawDecay if wrong else AdamWCorrected)(model.parameters(), lr=1e-3, weight_decay=0.01)

    return Training(model, optimizer, plainly(model, optimizer, images))
