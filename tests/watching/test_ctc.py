"""A loss that recurs in logarithms, within one operator of torch: its roundings are as large as the logarithms."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpcompare


class Longer(torch.autograd.Function):
    """Adds 1. Its backward makes the gradient larger by a thousandth."""

    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, gradient):
        return 1.001 * gradient


@pytest.mark.parametrize("wrong", [False, True])
def test_ctc_in_fp32_is_held_to_the_roundings_of_its_recurrence(wrong):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths, labels = torch.tensor([100, 98, 90, 95]), torch.tensor([30, 24, 15, 3])
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(2):
            chances = model(torch.randn(100, 4, 12)).log_softmax(-1)
            chances = Longer.apply(chances) if wrong else chances
            loss = F.ctc_loss(chances, torch.randint(1, 6, (4, 30)), lengths, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [defect.cause for defect in seen.defects] == (["loss"] if wrong else []), str(seen)
    assert seen.not_examined == []
