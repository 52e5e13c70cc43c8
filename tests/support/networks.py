"""Networks that drop units at random and compute activations again: a transformer, a CNN and an LSTM."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpcompare.tasks.images import MnistCnn
from mpcompare.tasks.text import Block, CausalAttention, CharGpt, CharLstm


class DroppingAttention(CausalAttention):
    """Attention that drops probabilities inside of torch's function."""

    p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(n, t, width))


class DroppingBlock(Block):
    """A block that drops what it adds to the stream, by modules (``functions=False``) or by functions."""

    def __init__(self, width: int, heads: int, p: float, functions: bool) -> None:
        super().__init__(width, heads)
        self.p, self.functions = p, functions
        if functions:
            self.attention = DroppingAttention(width, heads)
            self.attention.p = p
        else:
            self.drop1, self.drop2 = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropped(self.attention(self.norm1(x)), 1)
        return x + self.dropped(self.down(self.gelu(self.up(self.norm2(x)))), 2)

    def dropped(self, x: Tensor, number: int) -> Tensor:
        if self.functions:
            return F.dropout(x, self.p, self.training)
        return self.get_submodule(f"drop{number}")(x)


class DroppingGpt(CharGpt):
    """``CharGpt`` with dropout; ``reentrant`` says in which way blocks are checkpointed, None: they are not."""

    def __init__(
        self, shape: tuple[int, int, int, int, int], p: float = 0.1, functions: bool = False,
        reentrant: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(*shape)
        _, _, width, heads, blocks = shape
        self.blocks = nn.ModuleList(DroppingBlock(width, heads, p, functions) for _ in range(blocks))
        self.drop = nn.Dropout(p)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            h = block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant)
        return self.output(self.norm(h))


class DroppingCnn(MnistCnn):
    """``MnistCnn`` that drops channels and features, and computes its second convolution again where ``again``."""

    def __init__(self, width: int, p: float, again: bool) -> None:
        super().__init__(width)
        self.drop1, self.drop2, self.again = nn.Dropout2d(p / 2), nn.Dropout(p), again

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(self.pool1(self.relu1(self.norm1(self.conv1(x)))))
        x = checkpoint(self.second, x, use_reentrant=False) if self.again else self.second(x)
        return self.output(x)

    def second(self, x: Tensor) -> Tensor:
        return self.drop2(self.pool2(self.relu2(self.norm2(self.conv2(x)))).flatten(1))


class DroppingLstm(CharLstm):
    """``CharLstm`` of two layers, between which torch's own LSTM drops units."""

    def __init__(self, vocabulary: int, width: int, p: float) -> None:
        super().__init__(vocabulary, width, layers=2)
        self.lstm.dropout = p
