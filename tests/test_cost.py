"""The flops of a step, compared with hand formulas: a product M x K by K x N is 2 M N K; and the ledger."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import work
from support.networks import DroppingGpt
from support.tasks import make_batch, make_task, mlp_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mpcompare.cost import Ledger, allocated_bytes, step_flops
from mpcompare.tasks.text import CausalAttention, CharLstm

CPU = torch.device("cpu")


@pytest.mark.parametrize("hidden", [[], [24], [24, 16]])
def test_of_an_mlp_they_are_the_products_of_its_phases(hidden):
    task = make_task(hidden=hidden)
    products = work.phases(mlp_of(task), "fp32")
    expected = products["forward"].flops + products["backward"].flops
    sizes, n = mlp_of(task).sizes, task.batch_size
    weights = [fan_in * fan_out for fan_in, fan_out in pairwise(sizes)]
    assert expected == 2 * n * (3 * sum(weights) - weights[0])  # dx of the first layer is not needed
    assert step_flops(task.new_model(0, CPU), task.loss_fn, *make_batch(task, CPU)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_counts(reentrant):
    x, y = torch.randint(20, (4, 8)), torch.randint(20, (4, 8))
    plain, again = (
        step_flops(DroppingGpt((20, 8, 16, 2, 2), 0.1, reentrant=way), cross_entropy, x, y) for way in (None, reentrant)
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for block in DroppingGpt((20, 8, 16, 2, 2)).to("meta").blocks:  # some releases count no attention of a CPU
            block(torch.zeros(4, 8, 16, device="meta"))
    # A checkpoint stops where nothing more is needed, which is before the last layer of a block.
    assert 0.5 * counter.get_total_flops() < again - plain <= counter.get_total_flops()


def flops(model, x, targets=None):
    y = torch.zeros(x.shape[0], dtype=torch.int64) if targets is None else targets
    return step_flops(model, lambda output, y: output.float().square().mean() + 0 * y.sum(), x, y)


def test_of_convolutions():
    n, size = 2, 8
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1, stride=2))
    first = 2 * n * size * size * 4 * (3 * 9)
    second = 2 * n * (size // 2) ** 2 * 5 * (4 * 9)
    assert flops(model, torch.zeros(n, 3, size, size)) == 2 * first + 3 * second  # no dx of the first


def test_of_attention():
    n, t, width, heads = 2, 8, 16, 4
    model = nn.Sequential(nn.Linear(width, width), CausalAttention(width, heads))
    before = 2 * n * t * width * width
    linear = 2 * n * t * width * (3 * width + width)
    scores = 2 * n * t * t * width  # q k^T over all heads, or its result times v; the mask saves nothing
    assert flops(model, torch.zeros(n, t, width)) == 2 * before + 3 * (linear + 2 * scores)


@pytest.mark.parametrize("layers", [1, 2])
def test_of_an_lstm(layers):
    n, t, width, vocabulary = 3, 5, 8, 11
    to_gates = 2 * n * width * 4 * width  # a product of x or of h at one time, to four gates
    output = 2 * n * t * width * vocabulary
    x = torch.zeros(n, t, dtype=torch.int64)
    found = step_flops(CharLstm(vocabulary, width, layers), cross_entropy, x, x)
    # The first h is 0, and no gradient of it is needed.
    assert found == layers * (3 * 2 * t - 1) * to_gates + 3 * output


def cross_entropy(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def test_a_module_that_needs_values_has_none():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    assert flops(Chooses(), torch.ones(2, 4)) is None


class Features(nn.Sequential):
    """Takes features by a hook that knows the network."""

    def __init__(self):
        super().__init__(nn.Linear(6, 4), nn.ReLU())
        self.kept = {}

        def keep(module, inputs, output):
            self.kept["relu"] = output

        self[1].register_forward_hook(keep)

    def forward(self, x):
        super().forward(x)
        return self.kept.pop("relu")


def test_hooks_of_a_network_are_called_where_nothing_is_computed():
    x, y = torch.zeros(5, 6), torch.zeros(5, dtype=torch.long)
    assert step_flops(Features(), F.cross_entropy, x, y) == 2 * 2 * 5 * 6 * 4


def test_ledger_keeps_the_fullest_moment_by_kind():
    ledger = Ledger()
    ledger.alloc("gradients", "dW", 3, 4)
    ledger.alloc("inputs", "x", 10, 2)
    ledger.alloc("gradients", "db", 1, 4)
    ledger.free("dW", "db")
    ledger.alloc("activations", "z", 2, 4)
    assert ledger.peak == {"inputs": {"x": 20}, "gradients": {"dW": 12, "db": 4}}
    assert list(ledger.peak) == ["inputs", "gradients"]  # in the order of TENSOR_KINDS
    assert allocated_bytes(ledger.peak) == 36
