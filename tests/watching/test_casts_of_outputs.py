"""Losses that cast 16-bit outputs to fp32 at each use, so that each use passes down a gradient in 16 bits."""

import pytest
import torch
from torch import nn

import mpcompare


class Encoder(nn.Module):
    """Returns the mean and the logarithm of the variance of a code, and the input made of a drawn code."""

    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), nn.Linear(4, 8)

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, -1)
        return self.dec(mu + torch.randn_like(mu) * (logvar / 2).exp()), mu, logvar


def divergence(mu, logvar):
    """The divergence from the standard normal distribution. Both gradients of ``logvar`` nearly cancel."""
    return -0.5 * torch.sum(1 + logvar.float() - mu.float().pow(2) - logvar.float().exp())


def written(mu, logvar):
    """Writes into one of the casts."""
    one = logvar.float()
    one.mul_(3.0).add_(1.0)
    return (one * logvar.float()).sum() + mu.float().pow(2).sum()


def masked(mu, logvar):
    """Writes into an output of 16 bits, and uses it again."""
    mu[:, 0] = -1.0
    return mu.float().pow(2).sum() + (mu.float() * logvar.float()).sum()


def watched(term):
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            x = torch.rand(16, 8)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out, mu, logvar = model(x)
            (nn.functional.mse_loss(out.float(), x, reduction="sum") + term(mu, logvar)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("term", [divergence, written, masked])
def test_each_use_of_an_output_may_round_its_gradient(term):
    seen = watched(term)
    assert (seen.defects, seen.not_examined) == ([], [])
