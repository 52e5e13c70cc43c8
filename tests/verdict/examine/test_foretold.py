"""The memory of an examination is foretold from the tensors that its passes hold."""

import gc
import weakref

import pytest
import torch
from torch import nn

from mpcompare.precision import PRECISIONS
from mpcompare.verdict.examine.foretold import LIBRARIES, Activations, Held, activations_of, foretold

ROWS, IN, WIDTH, OUT = 32, 100, 50, 10
MB = 1 << 20


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, OUT))


def batch(rows=ROWS):
    return [(torch.randn(rows, IN), torch.randint(OUT, (rows,)))]


def test_activations_are_counted_by_layer():
    made = activations_of(network(), nn.functional.cross_entropy, batch())
    assert made.inputs == 4 * ROWS * (IN + WIDTH + WIDTH)
    assert made.outputs == 4 * ROWS * (WIDTH + WIDTH + OUT)
    assert made.largest == 4 * ROWS * (IN + WIDTH)
    # Relu keeps its result. The loss keeps the logarithms, a weight of all labels, and the labels.
    assert made.between == 4 * ROWS * (WIDTH + OUT) + 4 + 8 * ROWS
    assert made.columns == 0
    # The input has fewer numbers than are kept of a tensor. So have all other tensors.
    assert made.points == 2 * ROWS * (IN + WIDTH + 2 * WIDTH + WIDTH + OUT)


def test_a_convolution_unfolds_its_input():
    image = [(torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))]
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(36, OUT))
    made = activations_of(model, nn.functional.cross_entropy, image)
    assert made.columns == 2 * 3 * 8 * 8 * 4 * 9 // 4


def test_the_network_and_the_random_numbers_stay_as_they_are():
    model = nn.Sequential(network(), nn.BatchNorm1d(OUT), nn.Dropout())
    data, before = batch(), model[1].running_mean.clone()
    state = torch.get_rng_state()
    activations_of(model, nn.functional.cross_entropy, data)
    assert torch.equal(model[1].running_mean, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


ALIVE = weakref.WeakSet()


class Watched(nn.Module):
    def forward(self, x):
        ALIVE.add(y := x.exp())  # backward needs it
        return y


def test_nothing_that_was_counted_stays():
    model = nn.Sequential(network(), Watched(), nn.Linear(OUT, OUT), Watched())
    gc.disable()
    try:
        made = activations_of(model, nn.functional.cross_entropy, batch())
        assert made.between >= 2 * 4 * ROWS * OUT
        assert not ALIVE
    finally:
        gc.enable()


@pytest.mark.parametrize("exact_here", [False, True])
def test_many_parameters_need_the_moments_that_a_backend_loads(exact_here):
    held = Held(now=500 * MB, params=100 * MB, largest=10 * MB, moments=200 * MB, step=0)
    told = foretold(held, network(), nn.functional.cross_entropy, batch(), PRECISIONS["bf16"], exact_here)
    backend, mapped, in_memory, compared = 400 * MB, 200 * MB, 64 * MB, 30 * MB
    libraries = 0 if exact_here else LIBRARIES
    assert told == 500 * MB + backend + mapped + in_memory + compared + libraries


def test_rows_that_are_independent_are_computed_in_part():
    made = Activations(4096, inputs=4096, outputs=8192, largest=100, between=0, columns=0)
    assert made.of(1024) == Activations(1024, inputs=1024, outputs=2048, largest=25, between=0, columns=0)
    assert made.of(9999) == made
