import pytest
import torch
from torch import nn

from mpcompare.tasks.cast import cast_module
from mpcompare.tasks.text import CharGpt


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_cast_and_layers_that_sum_many_numbers_stay_in_fp32(dtype):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3))
    cast_module(model, dtype)
    assert [p.dtype for layer in (model[0], model[3]) for p in layer.parameters()] == [dtype] * 4
    assert {p.dtype for layer in (model[1], model[4]) for p in layer.parameters()} == {torch.float32}
    assert model[1].running_mean.dtype is torch.float32
    given = []
    model[4].register_forward_pre_hook(lambda _, args: given.append(args[0].dtype))  # after the one that casts
    assert model(torch.ones(2, 1, 4, 4, dtype=dtype)).dtype is dtype
    assert given == [torch.float32]


def test_floating_buffers_are_cast_and_others_are_not():
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    cast_module(model, torch.bfloat16)
    assert (model.scale.dtype, model.count.dtype) == (torch.bfloat16, torch.int64)


def test_a_weight_that_an_embedding_shares_with_a_product_is_cast_and_stays_shared():
    model = CharGpt(11, 6, width=8, heads=2, blocks=1, tied=True)
    cast_module(model, torch.bfloat16)
    assert model.embedding.weight is model.output.weight
    assert model.output.weight.dtype is torch.bfloat16
    assert model.positions.weight.dtype is torch.float32  # shared with nothing
    assert model(torch.zeros(2, 6, dtype=torch.int64)).dtype is torch.bfloat16
