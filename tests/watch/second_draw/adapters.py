"""Adapters that are kept in 16 bits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watch.second_draw.networks import GPT, MLP, cross_entropy, rows, tokens
from watch.second_draw.registry import DEFECT, Training, bf16, bug, plainly


class Lora(nn.Module):
    """A frozen linear layer with two adapters, of which one lags behind the other."""

    def __init__(self, linear: nn.Linear, r: int = 4) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.active = "default"
        i, o = linear.in_features, linear.out_features
        self.a = nn.ParameterDict({k: nn.Parameter(torch.randn(r, i) / i**0.5) for k in ("default", "old")})
        self.b = nn.ParameterDict({k: nn.Parameter(torch.randn(o, r) * 0.1) for k in ("default", "old")})

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x) + F.linear(F.linear(x, self.a[self.active]), self.b[self.active])
        return output


@bug(
    "AndreasBergmeister/ram#6",
    "the frozen lagging adapter is cast to bf16, and its EMA updates, made in place, are rounded away",
    fair="no master weights, weights, moments",
    kind=DEFECT,
    precision="bf16",
)
def ema_in_bf16(wrong: bool) -> Training:
    model = MLP()
    model.net[3] = Lora(model.net[3])
    model.net[5] = Lora(model.net[5])
    for name, p in model.named_parameters():
        if name.endswith(".old"):
            p.requires_grad_(False)
            if wrong:
                p.data = p.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    layers = [m for m in model.modules() if isinstance(m, Lora)]

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = rows()
            with bf16():
                loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for layer in layers:
                    for adapter in (layer.a, layer.b):
                        adapter["old"].mul_(0.999).add_(adapter["default"], alpha=0.001)

    return Training(model, optimizer, train)


class OnlyDefault(nn.Module):
    """A frozen linear layer with one adapter."""

    def __init__(self, linear: nn.Linear, r: int = 4) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, linear.in_features) / 8)
        self.b = nn.Parameter(torch.randn(linear.out_features, r) / 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x) + F.linear(F.linear(x, self.a), self.b)
        return output


@bug(
    "Lorenzo-Mazza/VersatIL#5",
    "bf16-mixed casts the adapters to bf16, too: at a rate of 2.5e-5 their updates round to nothing, and moments are "
    "bf16",
    fair="no master weights, moments",
    kind=DEFECT,
    precision="bf16",
    expect={"masters": "fp32"},
)
def adapters_in_bf16(wrong: bool) -> Training:
    model = GPT()
    for block in model.blocks:
        block.attn.qkv, block.attn.proj = OnlyDefault(block.attn.qkv), OnlyDefault(block.attn.proj)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith((".a", ".b")))
    model.to(torch.bfloat16)
    if not wrong:
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.float()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2.5e-5)

    return Training(model, optimizer, plainly(model, optimizer, tokens))
