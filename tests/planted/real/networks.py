"""The networks and the data in which real bugs show: as in the threads, and as small as they can be."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompare.tasks.data import Dataset

VOCABULARY = 96  # ids; the data use the first 64: the other rows of an embedding have no gradient


def tokens(samples: int, length: int) -> Dataset:
    """Returns ids ``[samples, length]`` below 64, of which each is mostly five times the one before it plus 1, and
    the next ids."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(64, (samples, length), generator=generator)
    noise *= torch.rand(samples, length, generator=generator) < 0.2
    ids = [torch.randint(64, (samples,), generator=generator)]
    for extra in noise.T:
        ids.append((5 * ids[-1] + 1 + extra) % 64)
    together = torch.stack(ids, dim=1)
    x, y = together[:, :-1], together[:, 1:]
    return Dataset("tokens", "asked for", x, y, x[:16], y[:16])


class RotaryAttention(nn.Module):
    """Causal attention whose queries and keys are turned by angles that grow with the position (RoPE)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = self.rotation(t, q)
        mixed = F.scaled_dot_product_attention(
            turned(q, cos, sin), turned(k, cos, sin), v.to(cos.dtype), is_causal=True
        )
        return self.output(mixed.transpose(1, 2).reshape(n, t, width))

    def rotation(self, length: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of the angles, ``[length, channels of a head]``, in fp32."""
        return rotation(length, q.shape[-1], torch.promote_types(q.dtype, torch.float32))


def rotation(length: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of all positions' angles, computed in ``dtype`` from the position on."""
    exponents = torch.arange(0, channels, 2, dtype=torch.float64) / channels
    frequencies = (10000.0**-exponents).to(dtype)
    angles = torch.arange(length).to(dtype)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the pairs of channels turned by the angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class SquaredRelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class RotaryBlock(nn.Module):
    """Attention and a two-layer network, each after an RMSNorm and with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attention = RotaryAttention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.activation = SquaredRelu()
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class RotaryGpt(nn.Module):
    """Ids ``[N, T]`` to the logits of each next id: a small transformer of the kind of LLaMA.

    Args:
        spread: the standard deviation of the initial embedding.
        outlier: the factor of its first channel: LLaMA's stream of residuals has channels that are a thousand times
            the others.
    """

    def __init__(self, width: int = 32, heads: int = 2, blocks: int = 2, spread: float = 1.0, outlier: float = 1.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        with torch.no_grad():
            self.embedding.weight.mul_(spread)
            self.embedding.weight[:, 0].mul_(outlier)
        self.blocks = nn.ModuleList(RotaryBlock(width, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.output(self.norm(h))


class OffsetNorm(nn.RMSNorm):
    """Gemma's RMSNorm: multiplies by ``1 + weight``, whose weight begins at 0."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, None, self.eps) * (1 + self.weight)


class OffsetGpt(RotaryGpt):
    """:class:`RotaryGpt` whose last norm is Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = OffsetNorm(32)


class Router(nn.Module):
    """Counts the tokens that each of four experts gets, and moves a bias toward experts that get fewer. So does the
    router of a mixture of experts that balances its load without a loss. Ids say where a token goes."""

    counts: Tensor
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, ids: Tensor) -> None:
        if self.training:
            found = torch.bincount(ids.flatten() % 4, minlength=4)
            self.counts += found
            self.bias += 1e-3 * (found.double().mean() - found).sign()


class RoutedGpt(RotaryGpt):
    """:class:`RotaryGpt` with the counters of a router, which do not change its output."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        self.router(x)
        return super().forward(x)


def batch_norm_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def policy_loss(output: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the loss of a policy gradient: minus the mean of advantage times log probability. An action has a reward
    of 1, and of 1 + 2^-7 where it is the last class; the advantages are rewards of groups of four, centred and divided
    by their spread in ``dtype``. Rows beyond the last group of four count for nothing.
    """
    whole = slice(len(y) - len(y) % 4)
    output, y = output[whole], y[whole]
    rewards = (1 + (y == 9) / 128).to(dtype).view(-1, 4)
    centred = rewards - rewards.mean(-1, keepdim=True)
    advantages = (centred / (rewards.std(-1, keepdim=True) + 1e-6)).flatten()
    log_probs = output.to(torch.promote_types(output.dtype, torch.float32)).log_softmax(-1).gather(-1, y[:, None])[:, 0]
    return -(advantages.to(log_probs.dtype) * log_probs).mean()


in_bf16 = partial(policy_loss, dtype=torch.bfloat16)
