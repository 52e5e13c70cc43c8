"""Watches right loops drawn at random. None may have a defect, and the watch may change no bit of it.

One of ten loops in bf16 keeps its whole network in bf16, so its weights hardly train. The watch must say that, and
nothing else.

    python scripts/watch_right_loops.py 300          # from seed 0 on
    python scripts/watch_right_loops.py 20 --first 100

It prints a line for each loop that has a defect, is not examined or is changed, and the counts at the end. The exit
code is 1 if a loop has a defect or is changed.
"""

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpcompare


class Residual(nn.Module):
    """Two convolutions with batch norm, to whose result the input is added."""

    def __init__(self, width: int, inplace: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.act = nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.body(x))


class Attention(nn.Module):
    """A block of a transformer, whose attention is work between layers."""

    def __init__(self, width: int, dropout: float, checkpointed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)
        self.checkpointed = checkpointed

    def block(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(a))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed and self.training:
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        return self.block(x)


class Language(nn.Module):
    """A small language model; its output may be a dict, and its embedding may be tied to its head."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        width = r.choice([16, 32])
        self.tokens = nn.Embedding(40, width)
        self.positions = nn.Parameter(0.02 * torch.randn(12, width))
        dropout, checkpointed = r.choice([0.0, 0.1]), r.random() < 0.3
        self.blocks = nn.ModuleList(Attention(width, dropout, checkpointed) for _ in range(r.choice([1, 2])))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 40, bias=False)
        if r.random() < 0.5:
            self.head.weight = self.tokens.weight
        self.nested = r.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        h = self.tokens(x) + self.positions
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return {"logits": logits, "hidden": h} if self.nested else logits


def network(r: random.Random) -> tuple[nn.Module, Callable[[int], tuple[Any, Tensor]]]:
    """Returns a network, and a function that makes a batch of so many rows."""
    kind = r.choice(["mlp", "cnn", "language", "language", "recurrent"])
    if kind == "mlp":
        widths = [12, *(r.choice([16, 24, 33]) for _ in range(r.choice([1, 2, 3]))), 5]
        layers: list[nn.Module] = []
        norm, act = (
            r.choice([nn.LayerNorm, nn.BatchNorm1d, nn.Identity]),
            r.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU]),
        )
        for a, b in pairwise(widths[:-1]):
            layers += [nn.Linear(a, b), norm(b), act(), nn.Dropout(r.choice([0.0, 0.2]))]
        return nn.Sequential(*layers, nn.Linear(widths[-2], 5)), lambda n: (torch.randn(n, 12), torch.randint(5, (n,)))
    if kind == "cnn":
        width, inplace = r.choice([8, 12]), r.random() < 0.5
        pool = r.choice([nn.MaxPool2d(2), nn.AvgPool2d(2)])
        net = nn.Sequential(
            nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace), pool,
            *(Residual(width, inplace) for _ in range(r.choice([1, 2]))),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5),
        )  # fmt: skip
        return net, lambda n: (torch.randn(n, 3, 12, 12), torch.randint(5, (n,)))
    if kind == "recurrent":

        class Tagger(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tokens, self.rnn, self.head = (
                    nn.Embedding(30, 12),
                    nn.GRU(12, 16, batch_first=True),
                    nn.Linear(16, 5),
                )

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.rnn(self.tokens(x))[0][:, -1])

        return Tagger(), lambda n: (torch.randint(30, (n, 6)), torch.randint(5, (n,)))
    language = Language(r)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(40, (n, 12))
        y = torch.where(torch.rand(n, 12) < 0.2, -100, torch.randint(40, (n, 12)))
        return x, y

    return language, batch


def optimizer_of(r: random.Random, net: nn.Module) -> torch.optim.Optimizer:
    params: Any = list(net.parameters())
    if r.random() < 0.4:
        thin = [p for p in params if p.dim() < 2]
        params = [{"params": [p for p in params if p.dim() >= 2]}, {"params": thin, "weight_decay": 0.0, "lr": 3e-4}]
        params = [group for group in params if group["params"]]
    return r.choice(
        [
            lambda: torch.optim.AdamW(params, lr=1e-3),
            lambda: torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=r.random() < 0.5),
            lambda: torch.optim.Adam(params, lr=1e-3),
            lambda: torch.optim.SGD(params, lr=0.05),
            lambda: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=r.random() < 0.5),
            lambda: torch.optim.RMSprop(params, lr=1e-3),
            lambda: torch.optim.NAdam(params, lr=1e-3),
            lambda: torch.optim.Adagrad(params, lr=1e-2),
        ]
    )()


def train(seed: int, watch: Callable[..., Any] | None) -> tuple[Any, list[Tensor]]:
    """Trains a loop; returns what ``watch`` yields, and all weights and buffers at the end."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    net, batch = network(r)
    dtype = r.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    short = r.random() < 0.1 and dtype is torch.bfloat16  # the whole network in 16 bits, and nothing in autocast
    if short:
        net.bfloat16()
    if r.random() < 0.2:
        next(net.parameters()).requires_grad_(False)
    optimizer = optimizer_of(r, net)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3) if seed % 3 else 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** r.choice([8, 12, 16]), enabled=dtype is torch.float16)
    accumulate, clip = r.choice([1, 1, 2, 3]), r.choice([None, 1.0, 0.05])
    smooth, unequal, zeros = r.choice([0.0, 0.0, 0.1]), r.random() < 0.3, r.random() < 0.5
    early, evaluates = r.random() < 0.3, r.random() < 0.3
    entered = watch(net, optimizer, steps=2) if watch else contextlib.nullcontext()
    with entered as seen:
        for _ in range(4):
            if not early:
                optimizer.zero_grad(set_to_none=not zeros)
            for number in range(accumulate):
                x, y = batch(8 + 4 * (unequal and number))
                if short and x.is_floating_point():
                    x = x.bfloat16()
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32 and not short):
                    out = net(x)
                    logits = out["logits"] if isinstance(out, dict) else out
                    loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten(), label_smoothing=smooth)
                if early and number == 0:
                    optimizer.zero_grad(set_to_none=not zeros)
                scaler.scale(loss / accumulate).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            if evaluates:
                net.eval()
                with torch.no_grad():
                    net(batch(4)[0].bfloat16() if short and batch(4)[0].is_floating_point() else batch(4)[0])
                net.train()
    if seen is not None and short:
        seen.defects = [d for d in seen.defects if d.cause != "no master weights"]
    return seen, [t.detach().clone() for t in (*net.parameters(), *net.buffers())]


def main() -> None:
    parser = argparse.ArgumentParser(description="Watches right loops drawn at random.")
    parser.add_argument("loops", type=int)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    wrong = changed = blind = 0
    began = time.monotonic()
    for seed in range(args.first, args.first + args.loops):
        _, right = train(seed, None)
        seen, found = train(seed, mpcompare.watch)
        same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(right, found, strict=True))
        wrong, changed, blind = wrong + bool(seen.defects), changed + (not same), blind + bool(seen.not_examined)
        for line in (*map(str, seen.defects), *(f"not examined: {each}" for each in seen.not_examined)):
            print(f"{seed}: {line}", flush=True)
        if not same:
            print(f"{seed}: its bits are others", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(
        f"{args.loops} loops: {wrong} with a defect, {changed} changed, {blind} not examined in part, {minutes:.1f} min"
    )
    sys.exit(bool(wrong or changed))


if __name__ == "__main__":
    main()
