"""Small networks that the loops train: a GPT as nanoGPT has it, and an MLP."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """A layer norm whose bias is optional. Input and output: ``(..., width)``."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Causal attention. Input and output: ``(batch, length, width)``."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropped = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).contiguous().view(batch, length, width)))


class Block(nn.Module):
    """A block of a transformer, whose norms come first. Input and output: ``(batch, length, width)``."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(width, bias=False), Norm(width, bias=False)
        self.attention = Attention(width, heads, dropout)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(self.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A GPT whose last layer is tied to its embedding, and which returns its logits and their loss."""

    def __init__(
        self, words: int = 64, length: int = 24, width: int = 32, blocks: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(blocks))
        self.norm = Norm(width, bias=False)
        self.head = nn.Linear(width, words, bias=False)
        self.tokens.weight = self.head.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(
                    p, 0.0, 0.02 / (2 * blocks) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                )

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits ``(batch, length, words)`` of tokens ``(batch, length)``, and their mean cross-entropy."""
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


def mlp(*widths: int) -> nn.Sequential:
    """Returns linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
