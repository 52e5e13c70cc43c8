"""The buffers with which the first step is replayed."""

import pytest
import torch
from torch import nn

from mpcompare.verdict.examine.forced.passes import replaced_buffers


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.rand(24, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("table", torch.arange(300, 308))


@pytest.mark.parametrize(
    ("changed", "formats", "replaced"),
    [
        ({}, {torch.float32}, set()),
        ({"mask": lambda b: b.bfloat16()}, {torch.bfloat16}, set()),
        ({"mask": lambda b: b.half().float()}, {torch.bfloat16}, set()),
        ({"mask": lambda b: b.bfloat16()}, {torch.float32, torch.bfloat16}, set()),  # as it was declared
        ({"mask": lambda b: b.bfloat16().float()}, {torch.float32}, {"mask"}),
        ({"mask": lambda b: b.bfloat16().float()}, {torch.float16}, {"mask"}),
        ({"mask": lambda b: b * 1.01}, {torch.bfloat16}, {"mask"}),
        ({"table": lambda b: b.bfloat16().long()}, {torch.bfloat16}, {"table"}),
    ],
)
def test_buffers_that_a_new_backend_shows_with_other_numbers_are_replaced(changed, formats, replaced):
    network = Masked()
    own = dict(network.named_buffers())
    shown = {name: changed.get(name, torch.clone)(b) for name, b in own.items()}
    found = replaced_buffers(network, shown | {"more": torch.ones(1)}, formats)
    assert set(found) == replaced
    assert all(torch.equal(found[name], own[name]) for name in found)
    assert replaced_buffers(network, {}, formats) == {}
