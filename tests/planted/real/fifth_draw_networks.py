"""The networks in which real bugs of the fifth draw show: small ones of the kinds of the threads."""

import torch
import torch.nn.functional as F
from planted.real.networks import VOCABULARY, RotaryGpt
from torch import Tensor, nn

from mpcompare.tasks.text import Block, CausalAttention, CharGpt

SHAPE = (VOCABULARY, 24, 32, 4, 2)  # the arguments of the small GPTs


class Gated(nn.Module):
    """SwiGLU: the first half of the channels, after SiLU, times the second half."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class WideValues(nn.Module):
    """Causal attention whose values have twice as many channels as its queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.channels = heads, width // heads
        self.qkv = nn.Linear(width, 4 * width, bias=False)
        self.output = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        parts = self.qkv(x).view(n, t, self.heads, 4 * self.channels).transpose(1, 2)
        q, k, v = parts.split([self.channels, self.channels, 2 * self.channels], dim=-1)
        return self.output(self.mix(q, k, v).transpose(1, 2).reshape(n, t, -1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Experts(nn.Module):
    """A mixture of four experts, of which each token uses the two with the largest probabilities."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares = self.shares(self.router(x).float().softmax(-1))
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * shares.unsqueeze(-2)).sum(-1)

    def shares(self, probabilities: Tensor) -> Tensor:
        """Returns the part of each expert in a token's output: 0 but for two of them."""
        largest, which = probabilities.topk(2, dim=-1)
        return torch.zeros_like(probabilities).scatter(-1, which, largest / largest.sum(-1, keepdim=True))


class Cap(nn.Module):
    """Gemma's cap of logits: none is larger than 30."""

    def forward(self, x: Tensor) -> Tensor:
        return 30 * torch.tanh(x / 30)


class LinearBiases(CausalAttention):
    """Attention whose scores fall with the distance (ALiBi), by another slope in each head."""

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.biases(t).to(q.dtype))
        return self.output(mixed.transpose(1, 2).reshape(n, t, width))

    def biases(self, length: int) -> Tensor:
        """Returns the numbers that are added to the scores ``[heads, queries, keys]``: -inf for a later token."""
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1) / self.heads)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        return (slopes[:, None, None] * self.distances(length)).masked_fill(later, -torch.inf)

    def distances(self, length: int) -> Tensor:
        places = torch.arange(length)
        return places - places[:, None]


class PlainAttention(CausalAttention):
    """Attention in which each token sees all others."""

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.output(mixed.transpose(1, 2).reshape(n, t, width))


class Patches(nn.Module):
    """Images ``[N, 1, 28, 28]`` to 16 patches of 7 x 7 behind a class token, each with its position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 7, stride=7)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1) + self.positions


class Vit(nn.Module):
    """A vision transformer of two blocks, which tells digits by their class token."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.patches = Patches(width)
        self.blocks = nn.Sequential(Block(width, heads), Block(width, heads))
        for block in self.blocks:
            block.attention = PlainAttention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(self.blocks(self.patches(x)))[:, 0])


def gated_gpt(wide_values: bool = False, spread: float = 1.0) -> RotaryGpt:
    """Returns a small LLaMA with SwiGLU."""
    model = RotaryGpt(spread=spread)
    for block in model.blocks:
        block.up, block.activation = nn.Linear(32, 256, bias=False), Gated()
        if wide_values:
            block.attention = WideValues(32, 2)
    return model


def capped_gpt() -> RotaryGpt:
    model = RotaryGpt()
    model.output = nn.Sequential(model.output, Cap())
    return model


def biased_gpt() -> CharGpt:
    model = CharGpt(*SHAPE)
    for block in model.blocks:
        block.attention = LinearBiases(32, 4)
    return model


def tanh_gpt() -> CharGpt:
    """Returns a small GPT whose GELU is written with tanh."""
    model = CharGpt(*SHAPE)
    for block in model.blocks:
        block.gelu = nn.GELU(approximate="tanh")
    return model


def experts_gpt() -> CharGpt:
    """Returns a small GPT whose two-layer networks are mixtures of experts."""
    model = CharGpt(*SHAPE)
    for block in model.blocks:
        block.up, block.gelu, block.down = nn.Identity(), nn.Identity(), Experts(32)
    return model


def group_norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8), nn.SiLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
        nn.Flatten(), nn.Linear(16 * 49, 10),
    )  # fmt: skip


def grouped_net() -> nn.Module:
    """Returns a CNN whose second convolution has two groups of channels."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 49, 10),
    )  # fmt: skip


def pooling_net() -> nn.Module:
    """Returns a CNN whose windows of max pooling overlap, as in ResNet and AlexNet."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 49, 10),
    )  # fmt: skip


def turning_mlp() -> nn.Module:
    """Returns an MLP with a leaky ReLU whose slope is negative: it is never below 0."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.LeakyReLU(-2.0), nn.Linear(64, 10))
