"""Operators without a float64 kernel are computed by other operators, so their networks are judged layer by layer."""

import pytest
import torch
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task
from torch import nn
from torch.nn import functional as F

from mpcompare.report.verdicts import judge_run
from mpcompare.verdict.examine.widened import Widened, grouped_product

ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)  # the second expert has nothing


@pytest.mark.parametrize(
    ("a", "b", "offs"),
    [((8, 16), (3, 16, 4), ENDS), ((3, 5, 16), (3, 16, 4), None), ((3, 8, 16), (16, 8), ENDS), ((8, 8), (8, 4), ENDS)],
)
def test_products_of_experts_are_those_of_torch(a, b, offs):
    torch.manual_seed(0)
    a, b = torch.randn(*a, requires_grad=True), torch.randn(*b, requires_grad=True)
    found, right = (of(a, b, offs=offs) for of in (grouped_product, F.grouped_mm))
    assert torch.allclose(found, right, atol=1e-5)
    assert grouped_product(a.double(), b.double(), offs).dtype is torch.float64


def test_rows_of_no_expert_are_there():
    rows, experts = torch.randn(10, 16), torch.randn(3, 16, 4)
    assert torch.equal(grouped_product(rows, experts, ENDS)[8:], torch.zeros(2, 4))
    assert grouped_product(torch.randn(3, 5, 16), torch.randn(16, 10), ENDS)[..., 8:].eq(0).all()


CASTS = {
    "float": lambda t: t.float(),
    "half": lambda t: t.half(),
    "double": lambda t: t.double(),
    "to a format": lambda t: t.to(torch.float32),
    "to a format by name": lambda t: t.to(dtype=torch.bfloat16),
    "to the format of another": lambda t: t.to(torch.ones(1)),
    "type": lambda t: t.type(torch.float32),
    "type_as": lambda t: t.type_as(torch.ones(1)),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_cast_is_a_copy_as_it_may_be_in_the_step(cast):
    kept, weight = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64, requires_grad=True)
    with Widened(torch.float64):
        copied = cast(kept)
        assert cast(weight) is weight
        assert kept.to("cpu") is kept
    assert copied.dtype is torch.float64
    kept.zero_()
    assert copied.tolist() == [1, 1, 1]


def test_numbers_that_are_made_of_no_real_numbers_are_in_float64():
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    with Widened(torch.float64):
        made = [pixels / 255.0, pixels * 0.5, torch.sqrt(pixels), torch.zeros(3), torch.rand(3)]
        kept = torch.ones(3).float() * torch.ones(3)
    assert {t.dtype for t in (*made, kept)} == {torch.float64}
    assert made[0].tolist() == pytest.approx([0, 0.2, 1])
    with Widened(torch.float32):
        assert (pixels / 255.0).dtype is torch.float32


class Experts(nn.Module):
    """Two experts, each with half of the rows. The network computes in fp32 between its layers, as Inkling2 does."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(20, 32), nn.Linear(32, 5)
        self.weight = nn.Parameter(torch.randn(2, 32, 32) / 32**0.5)

    def forward(self, x):
        z = self.before(x)
        ends = torch.tensor([len(z) // 2, len(z)], dtype=torch.int32)
        mixed = F.grouped_mm(z.to(self.weight.dtype), self.weight, offs=ends)
        return self.after((mixed.float() * mixed.float().square().mean(-1, keepdim=True).rsqrt()).to(z.dtype))


@pytest.mark.slow
def test_a_mixture_of_experts_is_seen_layer_by_layer():
    task = make_task(in_features=20, hidden=[8], out_features=5, batch_size=32, samples=32 * 4)
    data, task = dataset_of(task), type(task)(Experts, "cross_entropy", task.optimizer, 32, 32 * 4)
    reference = examined("amp", BACKENDS["amp"], task, data, "bf16", steps=3)
    assert not reference.findings.stopped
    assert "gradient after" in reference.findings.replays["first"].places
    assert judge_run(examined("mw", BACKENDS["master_weights"], task, data, "bf16", steps=3), reference).word == "same"


class Scattered(nn.Module):
    """Makes numbers from no tensor, in the default format, and writes rows into them."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(20, 32), nn.Linear(32, 5)

    def forward(self, x):
        z, at = self.before(x).float(), torch.arange(len(x)) // 2
        largest = torch.full((len(x) // 2, 32), -1e4).scatter_reduce(0, at[:, None].expand(z.shape), z, "amax")
        summed = torch.zeros(len(x) // 2, 32).index_add(0, at, z)
        return self.after((largest + summed)[at].to(self.after.weight.dtype))


@pytest.mark.slow
def test_a_network_may_write_into_numbers_that_it_makes():
    task = make_task(in_features=20, hidden=[8], out_features=5, batch_size=32, samples=32 * 4)
    data, task = dataset_of(task), type(task)(Scattered, "cross_entropy", task.optimizer, 32, 32 * 4)
    reference = examined("amp", BACKENDS["amp"], task, data, "bf16", steps=3)
    assert not reference.findings.stopped
    assert judge_run(examined("mw", BACKENDS["master_weights"], task, data, "bf16", steps=3), reference).word == "same"
