"""Networks on text: two that predict the next character, and one that tells praise from blame.

Tokens are int64 ids ``[N, T]`` below ``vocabulary``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompare.errors import InputError


class CharLstm(nn.Module):
    """Ids ``[N, T]`` to the logits of each next id ``[N, T, vocabulary]``: an embedding, an LSTM, a linear layer."""

    def __init__(self, vocabulary: int, width: int = 128, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers, batch_first=True)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        return self.output(states)


class SentimentLstm(nn.Module):
    """Ids ``[N, T]`` to the logits of two classes ``[N, 2]``: the mean of an LSTM's states over the real tokens.

    Id 0 is padding: it follows the real tokens, is embedded as zeros and left out of the mean.
    """

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.output = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))  # [N, T, width]
        real = (x != 0).unsqueeze(2)
        mean = states.masked_fill(~real, 0).sum(1) / real.sum(1).clamp_min(1)
        return self.output(mean)


class CharGpt(nn.Module):
    """Ids ``[N, T]``, T at most ``length``, to the logits of each next id ``[N, T, vocabulary]``: a small GPT.

    Its residual stream has ``width`` channels, a multiple of the attention's ``heads``. With ``tied`` the last layer's
    weights are the embedding's, one parameter for both.
    """

    def __init__(
        self, vocabulary: int, length: int, width: int = 128, heads: int = 4, blocks: int = 3, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)
        if tied:
            self.embedding.weight = self.output.weight  # the smaller of the two initial scales suits both

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.output(self.norm(h))


class Block(nn.Module):
    """``[N, T, width]`` to the same shape: attention and a two-layer network, each after a norm and with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class CausalAttention(nn.Module):
    """``[N, T, width]`` to the same shape: each token sees itself and the tokens before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise InputError("task.model.width", width, f"expected a multiple of task.model.heads={heads}")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)  # [N, heads, T, -1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(n, t, width))
