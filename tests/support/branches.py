"""A network with branches. A batch uses one branch: the other branches' parameters have no gradient in its step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpcompare.tasks.data import Dataset


class Branches(nn.Module):
    """``[n, 1 + inputs]`` to ``[n, outputs]``: a common layer, and one of several heads. The first element of the
    batch's first row is the number of the head."""

    def __init__(self, inputs: int, width: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(inputs, width), nn.LayerNorm(width)
        self.heads = nn.ModuleList(nn.Linear(width, outputs) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        head = self.heads[int(x[0, 0])]
        return head(nn.functional.gelu(self.norm(self.body(x[:, 1:]))))


def branched(seed: int, samples: int, inputs: int, outputs: int, rows: int, order: Sequence[int]) -> Dataset:
    """Returns data for :class:`Branches`: ``rows`` at a time are for one head, the heads in this order, over and
    over."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1 + inputs, generator=generator)
    x[:, 0] = torch.tensor(order, dtype=torch.float32)[torch.arange(samples) // rows % len(order)]
    y = (x[:, 1:] @ torch.randn(inputs, outputs, generator=generator)).argmax(dim=1)
    return Dataset("branched", "asked for", x, y, x[:rows], y[:rows])
