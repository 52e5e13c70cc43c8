"""The recipes that no backend offers: they train, or answer, as well as their formats let them."""

from functools import partial

import pytest
import torch
from torch import nn

from mpcompare.contract import take_step
from mpcompare.footprint.eight_bit import EightBitMoments, Quantized, with_int8_weights
from mpcompare.footprint.recipes import RECIPES
from mpcompare.footprint.subject import SIZES, Gpt2
from mpcompare.tasks.mlp import Mlp
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt

BY_NAME = {recipe.name: recipe for recipe in RECIPES}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_gpt2_has_the_parameters_of_the_released_weights(name, params):
    with torch.device("meta"):
        model = Gpt2(*SIZES[name])
    assert sum(p.numel() for p in model.parameters()) == params
    assert model.output.weight is model.embedding.weight


def test_quantized_values_are_within_half_a_code():
    values = torch.randn(100, 77, generator=torch.Generator().manual_seed(0))
    again = Quantized(values).values()
    blocks = nn.functional.pad(values.flatten(), (0, -values.numel() % 256)).view(-1, 256)
    largest = blocks.abs().amax(1, keepdim=True).expand_as(blocks).flatten()[: values.numel()].view_as(values)
    assert ((again - values).abs() <= largest / 254 * 1.0001).all()


def test_eight_bit_momentum_follows_fp32_momentum():
    torch.manual_seed(0)
    start, rule = torch.randn(64, 128), Sgd(0.1, 0.9)
    exact, eight = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = rule.make([exact]), EightBitMoments([eight], rule)
    for _ in range(5):
        exact.grad = eight.grad = torch.randn(64, 128)
        for optimizer in optimizers:
            optimizer.step()
    assert isinstance(optimizers[1].state[eight]["momentum_buffer"], Quantized)
    assert (eight - exact).norm() < 0.02 * (exact - start).norm()


@pytest.mark.parametrize("name", ["plain bf16", "8-bit moments"])
def test_recipe_learns(name):
    torch.manual_seed(0)
    task = Task(partial(Mlp, 64, [256], 4), "cross_entropy", Sgd(0.1, 0.9), 128)
    x = torch.randn(128, 64)
    y = x[:, :4].argmax(1)
    backend = BY_NAME[name].make(task.new_model(0, torch.device("cpu")), task)
    losses = [take_step(backend, [(x, y)], 0.1).item() for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("tied", [False, True])
def test_int8_weights_answer_like_fp32(tied):
    torch.manual_seed(0)
    model = CharGpt(96, 16, tied=tied)
    ids = torch.randint(96, (4, 16))
    small = with_int8_weights(model)
    with torch.no_grad():
        exact, rounded = model(ids), small(ids).float()
    assert (rounded - exact).norm() < 0.05 * exact.norm()
    assert (small.output.codes is small.embedding.codes) == tied


def test_a_transformer_layer_of_torch_answers_with_int8_weights_on_its_fast_path():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    x = torch.randn(4, 8, 16)
    with torch.no_grad():
        exact, rounded = layer(x), with_int8_weights(layer)(x.bfloat16()).float()
    assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_every_place_of_a_layer_and_a_layer_by_itself_get_int8_weights():
    layer = nn.Linear(4, 4)
    for model, codes in ((nn.Sequential(layer, nn.ReLU(), layer), 2), (layer, 1)):
        small = with_int8_weights(model)
        assert sum(p.numel() for p in small.parameters()) == 4  # the bias, once
        assert sum(buffer.dtype is torch.int8 for buffer in small.state_dict().values()) == codes
        assert len({buffer.data_ptr() for buffer in small.buffers()}) == 2  # codes and scales, once
