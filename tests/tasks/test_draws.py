"""Random numbers of a step: the same masks for every dtype, and for all who begin with the same seed."""

import random

import pytest
import torch
import torch.nn.functional as F
from support.marks import CUDA
from torch import nn

from mpcompare.tasks import draws
from mpcompare.tasks.draws import (
    MaskedDropout,
    masks_are_shared,
    masks_depend_on_dtype,
    seed_step,
    state,
    with_shared_masks,
    without_masks,
)

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("elements", [7, 1000, 1 << 17])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_a_mask_and_the_state_after_it_do_not_depend_on_the_dtype_on_a_cpu(elements, p):
    masks, states = [], set()
    for dtype in DTYPES:
        seed_step(3)
        masks.append(F.dropout(torch.ones(elements, dtype=dtype), p) != 0)
        states.add(state(CPU))
    assert all(torch.equal(masks[0], mask) for mask in masks)
    assert len(states) == 1
    assert not masks_depend_on_dtype(CPU)


@pytest.mark.parametrize(
    ("layer", "dtypes"),
    [
        (nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), DTYPES),
        (nn.LSTM(8, 8, 2, batch_first=True, dropout=0.4), (torch.float32, torch.bfloat16, torch.float64)),
        (nn.Dropout1d(0.3), DTYPES),
        (nn.AlphaDropout(0.3), DTYPES),
    ],
)
def test_layers_that_drop_inside_have_the_same_masks_in_every_dtype(layer, dtypes):
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    outputs, states = [], set()
    for dtype in dtypes:
        seed_step(5)
        output = layer.to(dtype)(x.to(dtype))
        outputs.append((output[0] if isinstance(output, tuple) else output).detach().double())
        states.add(state(CPU))
    assert len(states) == 1
    for output in outputs:  # another mask would be as far away as the output is large
        assert (output - outputs[0]).norm() < 0.03 * outputs[0].norm()


@pytest.mark.parametrize("device", ["cpu", CUDA], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_masked_dropout_is_torchs_with_a_mask_of_fp32(dtype, device):
    x = torch.randn(50, 40, device=device).to(dtype).requires_grad_()
    masked, plain = MaskedDropout(0.3), nn.Dropout(0.3)
    seed_step(1)
    output = masked(x)
    seed_step(1)
    assert torch.equal(output != 0, masked(x.float()) != 0)
    output.sum().backward()
    torch.testing.assert_close(x.grad, (output != 0).to(dtype) * (1 / 0.7), rtol=0.01, atol=0)
    if device.type == "cpu":
        seed_step(1)
        assert torch.equal(output, plain(x))
    before = state(device)
    assert torch.equal(masked.eval()(x), x)
    assert state(device) == before


def test_dropout_layers_are_replaced_where_they_are_and_only_those_that_drop():
    class Own(nn.Dropout):
        pass

    network = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.2), Own(0.1)), nn.Dropout(0.0))
    shared = with_shared_masks(network)
    assert [type(m) for m in shared.modules()][1:] == [nn.Linear, nn.Sequential, MaskedDropout, Own, nn.Dropout]
    assert shared[1][0].p == 0.2
    assert type(network[1][0]) is nn.Dropout
    assert with_shared_masks(network[0]) is network[0]


def test_a_dropout_that_stands_twice_is_replaced_twice_by_one():
    dropout = nn.Dropout(0.2)
    shared = with_shared_masks(nn.Sequential(dropout, nn.Linear(3, 3), dropout, nn.Sequential(dropout)))
    assert type(shared[0]) is MaskedDropout
    assert shared[0] is shared[2] is shared[3][0]
    assert without_masks(shared) == 1
    assert {type(shared[place]) for place in (0, 2)} == {nn.Dropout}


def test_masks_of_functions_are_not_shared_where_they_depend_on_the_dtype(monkeypatch):
    x = torch.ones(4, 3)
    layers, function = nn.Sequential(MaskedDropout(0.5)), nn.Sequential(nn.Dropout(0.5))
    assert masks_are_shared(layers, x)
    assert masks_are_shared(function, x)
    monkeypatch.setattr(draws, "masks_depend_on_dtype", lambda _: True)
    assert masks_are_shared(layers, x)
    assert layers[0].training
    assert not masks_are_shared(function, x)


def test_each_step_of_each_seed_has_numbers_of_its_own_and_pythons_are_left():
    random.seed(0)
    drawn, expected = [], random.Random(0).random()
    for number, seed in ((1, 0), (2, 0), (1, 1), (1, 0)):
        seed_step(number, seed)
        drawn.append(torch.rand(()).item())
    assert drawn[3] == drawn[0]
    assert len(set(drawn)) == 3
    assert random.random() == expected
