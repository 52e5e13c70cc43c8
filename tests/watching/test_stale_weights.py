"""``mpcompare.watch`` on layers that compute with the weights of an earlier update."""

import pytest
import torch
from support.marks import BF16_LSTM
from support.watched_loops import small_network, tokens
from torch import nn
from torch.nn import functional as F

import mpcompare


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.of, self.rnn, self.head = nn.Embedding(32, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.rnn(self.of(x))[0][:, -1])


def watched(net, **autocast):
    """Trains with one autocast around all updates."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with mpcompare.watch(net, optimizer, steps=2) as seen, torch.autocast("cpu", dtype=torch.bfloat16, **autocast):
        for _ in range(2):
            x, y = tokens()
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return seen


@pytest.mark.parametrize(
    ("net", "layer"), [(small_network, "2"), pytest.param(Recurrent, "rnn", marks=[BF16_LSTM, pytest.mark.slow])]
)
def test_casts_that_autocast_keeps_are_stale_weights(net, layer):
    (defect,) = watched(net()).defects
    assert (defect.cause, defect.place) == ("stale weights", layer)
    assert f"{layer} computes in update 2 with the weights of update 1" in defect.sentence
    assert "Autocast keeps its casts" in defect.sentence


@pytest.mark.slow
def test_an_autocast_that_keeps_none_has_no_defect():
    assert watched(small_network(), cache_enabled=False).defects == []
