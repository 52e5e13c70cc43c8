"""Weights at which nothing is nearly linear."""

import math

import pytest
import torch
from torch import nn

from mpcompare.precision import PRECISIONS
from mpcompare.tasks.text import CharGpt, CharLstm
from mpcompare.verdict.examine.exact_values import Problem
from mpcompare.verdict.examine.layers import outputs_of
from mpcompare.verdict.examine.sharp import OF_LOGITS, ROWS, SPREAD, sharp_weights

IDS = torch.randint(30, (8, 16), generator=torch.Generator().manual_seed(0))
FP16 = PRECISIONS["fp16"]


def sharpened(model, x):
    return sharp_weights(Problem(model, None, [(x, None)]), FP16)


def new(make):
    torch.manual_seed(0)
    return make()


def test_products_spread_and_every_precision_holds_the_weights():
    model = new(lambda: CharGpt(30, 16, 32, 4, 2))
    params = sharpened(model, IDS)
    assert all(torch.equal(p.half().float(), p) for p in params.values())
    again = sharpened(model, IDS)
    assert all(torch.equal(p, again[name]) for name, p in params.items())
    for name, p in model.named_parameters():
        p.data = params[name]
    with outputs_of(model) as outputs:
        model(IDS)
    for name in ("blocks.0.attention.qkv", "blocks.1.up"):
        assert outputs.tensors[name].std().item() == pytest.approx(SPREAD, rel=0.15)
    assert outputs.tensors["output"].std().item() == pytest.approx(OF_LOGITS, rel=0.15)
    assert model.norm.weight.std() > 0.1  # all weights were 1
    assert model.blocks[0].up.bias.std() > 0.1


def test_some_rows_tell_how_far_outputs_spread():
    model, x = new(lambda: nn.Linear(8, 4)), torch.randn(ROWS + 1, 8)
    params, x[-1] = sharpened(model, x), math.nan
    assert torch.equal(sharpened(model, x)["weight"], params["weight"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Embedding(30, 8), nn.GRU(8, 8, bidirectional=True), nn.Identity()),
        lambda: CharLstm(30, 8),
        lambda: nn.Sequential(nn.Embedding(30, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))),
    ],
)
def test_layers_whose_products_cannot_be_seen_have_finite_weights_too(make):
    model = new(make)
    if isinstance(model[-1] if isinstance(model, nn.Sequential) else None, nn.Identity):
        model[-1].forward = lambda outputs: outputs[0]
    params = sharpened(model, IDS)
    assert set(params) == {name for name, _ in model.named_parameters()}
    assert all(p.isfinite().all() and p.any() for p in params.values())


def test_a_layer_that_begins_at_0_is_drawn():
    model = new(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    nn.init.zeros_(model[1].weight)
    params = sharpened(model, torch.randn(64, 8))
    assert params["1.weight"].std() > 0.5


class Router(nn.Linear):
    """Returns more than its product, and is given its input by name."""

    def forward(self, rows):
        y = super().forward(rows)
        return y, y.argmax(-1)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router(8, 4)

    def forward(self, x):
        return self.router(rows=x)[0]


def test_a_layer_that_returns_more_than_its_product_spreads_too():
    model, x = new(Routed), torch.randn(64, 8)
    params = sharpened(model, x)
    model.router.weight.data, model.router.bias.data = params["router.weight"], params["router.bias"]
    assert model(x).std().item() == pytest.approx(OF_LOGITS, rel=0.15)
