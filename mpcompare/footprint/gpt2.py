"""GPT-2 by its configuration, in the four sizes of Radford et al., "Language Models are Unsupervised Multitask
Learners" (2019), table 2."""

from dataclasses import dataclass

from torch import nn

from mpcompare.tasks.text import CharGpt


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


class Gpt2(CharGpt):
    """Ids ``[N, T]``, T at most 1024, to the logits of each next id ``[N, T, 50257]``.

    The last layer's weights are those of the embedding, and it has no bias. There is no dropout.
    """

    def __init__(self, size: Size) -> None:
        super().__init__(VOCABULARY, CONTEXT, size.width, size.heads, size.blocks)
        self.output = nn.Linear(size.width, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
