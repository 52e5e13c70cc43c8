"""Norms of rows of zeros, whose variance is below the numbers of fp16."""

import torch
from support.backends import BACKENDS
from support.foreign import VOCABULARY, Network, ids
from support.mutations import layers_of, subject_of
from torch import nn

from mpcompare.verdict.judge.check import Case
from mpcompare.verdict.judge.layers import checks as layer_checks


class OwnNorm(nn.Module):
    """Divides by the root of a mean square, in fp32."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        square = x.float().square().mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(square + 1e-8) * self.weight).to(x.dtype)


class Padded(nn.Module):
    """Norms the embeddings of tokens, of which that of token 0 is 0."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, 32, padding_idx=0), OwnNorm(32)
        self.mix, self.last = nn.Linear(32, 32), nn.Linear(32, VOCABULARY)

    def forward(self, x):
        x = self.embedding(x)
        return self.last(x + self.mix(self.norm(x)))


def test_a_norm_of_rows_of_zeros_is_not_called_wrong_in_fp16():
    network = Network("padded", "torch", Padded, ids)
    amp, run = (layers_of(subject_of(network, "fp16", BACKENDS[b]), b) for b in ("amp", "master_weights"))
    assert not [check.because for check in layer_checks(Case(run, amp)) if not check.passed]
    places = run.findings.replays["first"].places
    stored = places["gradient embedding"]
    assert stored.rounding > 2.0**-12 / 3 * stored.norm  # one rounding of fp16, as in the error itself
    assert run.findings.replays["first"].rounding["norm.weight"].error > 0
