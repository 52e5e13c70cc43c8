"""GPT-2 by its configuration, in the four sizes of Radford et al., "Language Models are Unsupervised Multitask
Learners" (2019), table 2."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpcompare.tasks.text import Block


@dataclass(frozen=True)
class Size:
    """One of the sizes.

    Attributes:
        width: channels of the residual stream.
        heads: attention heads of a block.
        blocks: number of blocks.
        params: number of parameters of the released weights.
    """

    width: int
    heads: int
    blocks: int
    params: int


SIZES = {
    "gpt2": Size(768, 12, 12, 124_439_808),
    "gpt2-medium": Size(1024, 16, 24, 354_823_168),
    "gpt2-large": Size(1280, 20, 36, 774_030_080),
    "gpt2-xl": Size(1600, 25, 48, 1_557_611_200),
}
VOCABULARY, CONTEXT = 50257, 1024


class Gpt2(nn.Module):
    """Ids ``[N, T]``, T at most 1024, to the logits of each next id ``[N, T, 50257]``.

    The last layer's weights are those of the embedding, and it has no bias. There is no dropout.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(CONTEXT, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.output = nn.Linear(size.width, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.output(self.norm(h))
