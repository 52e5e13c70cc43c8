"""Frozen weights in 16 bits: fp32 in the harness, and as the user made them in a backend."""

import copy

import pytest
import torch
from support.backends import BACKENDS
from support.unusual import Adapted, task_of

from mpcompare.errors import InputError
from mpcompare.loss_scale import NoLossScale
from mpcompare.tasks.frozen import as_made, dtypes_of

CPU = torch.device("cpu")


def test_a_network_is_widened_and_a_backend_is_given_the_same_values_in_16_bits():
    task, _ = task_of(Adapted)
    network = copy.deepcopy(task.new_model(0, CPU))
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert dict(dtypes_of(network)) == dict.fromkeys(("base.0.weight", "base.0.bias"), torch.bfloat16)
    given = as_made(network)
    assert given.base[0].weight.dtype is torch.bfloat16
    assert torch.equal(given.base[0].weight.float(), network.base[0].weight)
    assert as_made(given.output) is given.output


@pytest.mark.parametrize(
    ("name", "held"), [("amp", torch.bfloat16), ("fp32", torch.float32), ("master_weights", torch.bfloat16)]
)
def test_a_backend_holds_them_in_its_own_way_and_shows_them_in_fp32(name, held):
    task, data = task_of(Adapted)
    network = task.new_model(0, CPU)
    precision = "fp32" if name == "fp32" else "bf16"
    backend = BACKENDS[name](as_made(network), task, precision, NoLossScale())
    backend.forward(data.x_train[:32], data.y_train[:32])
    assert backend.model.base[0].weight.dtype is held
    shown = backend.master_params()["base.0.weight"]
    assert shown.dtype is torch.float32
    assert torch.equal(shown, network.base[0].weight)


def test_a_weight_that_is_trained_begins_in_fp32():
    task, _ = task_of(Adapted)
    broken = copy.copy(task)
    object.__setattr__(broken, "model", lambda: Adapted().requires_grad_())
    with pytest.raises(InputError, match=r"parameter base.0.weight is torch.bfloat16: expected fp32, in which"):
        broken.new_model(0, CPU)
