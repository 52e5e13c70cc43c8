"""The buffers with which the first step is replayed, and those that it moves."""

import pytest
import torch
from support.foreign import Network, images
from support.mutations import subject_of
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.verdict.examine.forced.passes import layers_of_first_step, replaced_buffers


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


class Counting(nn.Module):
    """Counts its calls, and the numbers above 0 that roundings may turn."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
        self.register_buffer("table", torch.arange(8))
        self.register_buffer("above", torch.zeros(8, dtype=torch.int64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        x = self.norm(self.first(x.flatten(1)))
        self.above += (x > 0).sum(0)
        return self.last(x)


class CountsTwice(Amp):
    def forward(self, x, y):
        loss = super().forward(x, y)
        self.model.norm.num_batches_tracked += 1
        self.model.table += 1
        return loss


class Looks(CountsTwice):
    """Calls the network once more without gradients."""

    without = torch.no_grad

    def forward(self, x, y):
        loss = super().forward(x, y)
        self.model.eval()
        with self.without():
            self.model(x)
        self.model.train()
        return loss


class LooksInInferenceMode(Looks):
    without = torch.inference_mode


WRONG = {"table", "norm.num_batches_tracked"}


@pytest.mark.parametrize(
    ("backend", "wrong"), [(Amp, set()), (CountsTwice, WRONG), (Looks, WRONG), (LooksInInferenceMode, WRONG)]
)
def test_whole_numbers_of_buffers_are_those_of_the_replay(backend, wrong):
    network = Network("counting", "here", Counting, lambda samples: images(4, 1, samples), ())
    found = layers_of_first_step(subject_of(network, "bf16", backend))
    assert set(found.other_whole_numbers) == wrong
