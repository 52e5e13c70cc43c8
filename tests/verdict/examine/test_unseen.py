"""The work of a replay is hidden from its own modes, which see the network's functions alone."""

import pytest
import torch
from support.backends import BACKENDS
from support.foreign import Network, images
from support.mutations import layers_of, subject_of
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpcompare.precision import PRECISIONS
from mpcompare.verdict.examine.forced.roundings import Roundings
from mpcompare.verdict.examine.forced.samples import RoundedResults
from mpcompare.verdict.examine.unseen import Unseen

U = 2.0**-8  # bf16


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_no_mode_sees_what_is_hidden_and_each_sees_what_is_lifted():
    x, functions, outer, inner = torch.ones(3), Functions(), Operators(), Operators()
    with functions, outer, inner:
        with Unseen() as unseen:
            x.exp()
            with unseen.lifted():
                x.sin()
            with Unseen(), pytest.raises(RuntimeError), unseen.lifted():
                x.view(5)
            x.log()
        x.cos()
    assert functions.seen == ["sin", "view", "cos"]
    assert outer.seen == inner.seen == ["aten::sin", "aten::view", "aten::cos"]


class Own(Tensor):
    """A tensor with a method of its own."""

    def in_rows(self):
        return self.flatten(1)


class Marks(nn.Module):
    def forward(self, x):
        return x.tanh().as_subclass(Own)


class Between(nn.Module):
    """Calls a method of what a layer returns, compares numbers between layers, and has a weight made by a hook."""

    def __init__(self):
        super().__init__()
        self.first, self.marks = nn.Linear(784, 64), Marks()
        self.normed, self.last = nn.utils.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 10)

    def forward(self, x):
        y = self.marks(self.first(x.flatten(1))).in_rows().as_subclass(Tensor)
        return self.last(self.normed(torch.where(y > y.flip(0), y, 0.0)))


@pytest.fixture(scope="module")
def layers():
    network = Network("between", "here", Between, lambda samples: images(28, 1, samples))
    run = layers_of(subject_of(network, "bf16", BACKENDS["amp"]), "run")
    return run.findings.replays["first"]


def test_a_layer_hands_on_the_class_of_its_tensor(layers):
    assert "output marks" in layers.places


def test_a_weight_that_a_hook_computes_is_rounded_as_other_weights(layers):
    """One rounding of each result is off by about u / (sqrt(3) sqrt(2)) of the norm, wherever its numbers lie."""
    for layer in ("first", "normed", "last"):
        place = layers.places[f"output {layer}"]
        assert place.error < U / 2 * place.norm, layer


def test_what_compares_choices_is_no_operation_of_the_network(layers):
    """Between ``marks`` and ``normed`` numbers are selected, and none is rounded."""
    assert layers.choices
    assert layers.digits.keys() == {"first", "marks", "normed", "last"}


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_nothing_rounds_the_operations_of_a_rounding(kind):
    torch.manual_seed(0)
    value = torch.randn(4096, dtype=kind, requires_grad=True)
    roundings = Roundings(PRECISIONS["bf16"])
    alone = roundings.round_(value.detach().clone())
    arithmetic = RoundedResults.__new__(RoundedResults)
    arithmetic.roundings = roundings
    with roundings:
        roundings.passing("forward")
        assert torch.equal(arithmetic.stored(value.detach()), alone)
