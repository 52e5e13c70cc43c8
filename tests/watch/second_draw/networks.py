"""The networks of the second draw, and their batches. They are small networks of the kinds that its threads train.

The batches come from torch's global generator, which each loop's seed sets.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.h = h
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = heads(self.qkv(x), self.h)
        output: Tensor = self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        )
        return output


def heads(x: Tensor, h: int) -> list[Tensor]:
    """Returns queries, keys and values in ``h`` heads. In ``x`` all of them lie side by side."""
    b, t, d = x.shape
    return [y.view(b, t, h, d // 3 // h).transpose(1, 2) for y in x.chunk(3, -1)]


class Block(nn.Module):
    def __init__(self, d: int = 32, h: int = 4) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = Attention(d, h)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        output: Tensor = x + self.mlp(self.n2(x))
        return output


class GPT(nn.Module):
    """A decoder of two blocks. Input: tokens below 64, ``(rows, 16)``."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        nn.init.normal_(self.tok.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(self.norm(x))
        return output


class ConvNet(nn.Module):
    """A CNN with batch norm. Input: ``(rows, 3, 16, 16)``."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(self.backbone(x))
        return output


class UNet(nn.Module):
    """A U-Net of one level with group norms. Input: ``(rows, 3, 16, 16)``; output: ``(rows, 1, 16, 16)``."""

    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2, self.mid = self.two(3, 8), self.two(8, 16), self.two(16, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.u1 = self.two(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    @staticmethod
    def two(i: int, o: int) -> nn.Module:
        """Returns two convolutions, each with its norm."""
        first, second = nn.Conv2d(i, o, 3, padding=1), nn.Conv2d(o, o, 3, padding=1)
        return nn.Sequential(first, nn.GroupNorm(4, o), nn.SiLU(), second, nn.GroupNorm(4, o), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        a = self.d1(x)
        b = self.mid(self.d2(F.max_pool2d(a, 2)))
        output: Tensor = self.out(self.u1(torch.cat([a, self.up(b)], 1)))
        return output


class MLP(nn.Module):
    def __init__(self, i: int = 20, d: int = 64, o: int = 5) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(i, d), nn.LayerNorm(d), nn.GELU(), nn.Linear(d, d), nn.GELU(), nn.Linear(d, o)
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output


class Gan(nn.Module):
    """A generator and a discriminator in one network, which is told which of the two to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 20))
        self.discriminator = nn.Sequential(nn.Linear(20, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x: Tensor, of: str) -> Tensor:
        output: Tensor = getattr(self, of)(x)
        return output


def tokens() -> tuple[Tensor, Tensor]:
    """Returns tokens, and the tokens that follow them."""
    x = torch.randint(64, (8, 17))
    return x[:, :-1], x[:, 1:]


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 16, 16), torch.randint(10, (8,))


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 20), torch.randint(5, (32,))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the mean over all rows, whatever dimensions they have."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))
