"""Copies of networks whose forward is a function of somebody else."""

import copy
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.task import sharing_parameters


def by_default(layer: nn.Linear):
    return lambda x, layer=layer: F.linear(x, layer.weight, layer.bias)


def by_closure(layer: nn.Linear):
    return lambda x: F.linear(x, layer.weight, layer.bias)


def around(layer: nn.Linear):
    first = layer.forward  # a method of the layer

    def forward(x):
        return first(x)

    return lambda x: forward(x)


def by_partial(layer: nn.Linear):
    return partial(nn.Linear.forward, layer)


def itself(layer: nn.Linear):
    def forward(x, again=False):
        return F.linear(x, layer.weight, layer.bias) if again else forward(x, again=True)

    return forward


def patched(forward) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2))
    for layer in model[::2]:
        layer.forward = forward(layer)
    return model


@pytest.mark.parametrize("forward", [by_default, by_closure, around, by_partial, itself])
def test_the_forward_of_a_copy_has_the_weights_of_the_copy(forward):
    model, x = patched(forward), torch.randn(5, 4)
    made = copy_of(model)
    again = copy_of(made)
    for each, factor in ((made, 0.0), (again, 2.0)):
        with torch.no_grad():
            each[0].weight.mul_(factor)
    right = patched(forward)
    right.load_state_dict(made.state_dict())
    assert torch.equal(made(x), right(x))
    assert not torch.equal(made(x), model(x))
    made(x).sum().backward()
    assert all(p.grad is not None for p in made.parameters())
    assert all(p.grad is None for p in (*model.parameters(), *again.parameters()))


def test_the_same_parameters_may_stay():
    model = patched(by_closure)
    made = sharing_parameters(model)
    assert [id(p) for p in made.parameters()] == [id(p) for p in model.parameters()]
    made[0].weight = nn.Parameter(torch.zeros(3, 4))
    assert torch.equal(made[0](torch.ones(1, 4)), model[0].bias[None])


def test_a_network_without_functions_is_copied_as_by_copy():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    for name, t in copy.deepcopy(model).state_dict().items():
        assert torch.equal(t, copy_of(model).state_dict()[name])


class Features(nn.Module):
    """Keeps what a hook sees of a layer, by a function that knows the network."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 3), {}

        def keep(module, inputs, output):
            self.kept["layer"] = output

        self.layer.register_forward_hook(keep)

    def forward(self, x):
        self.layer(x)
        return self.kept.pop("layer")


def test_a_hook_of_a_copy_writes_into_the_copy():
    model, x = Features(), torch.randn(5, 4)
    made = copy_of(copy_of(model))
    assert torch.equal(made(x), model(x))
    assert made.kept == model.kept == {}


class Fades(nn.Module):
    """Keeps a result of its layer under two names, and writes into it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.state = self.again = self.layer(torch.ones(1, 4)) * 1

    def forward(self, x):
        with torch.no_grad():
            self.state.mul_(0.5)
        return self.layer(x) + self.again.detach()


def test_a_result_that_a_network_keeps_is_a_copys_own():
    model = Fades()
    before, made = model.state.detach().clone(), copy_of(model)
    made(torch.randn(5, 4))
    assert torch.equal(model.state, before)
    assert made.again is made.state
    assert torch.equal(made.state, before / 2)


class Waits(nn.Linear):
    """Its copy begins, and waits a moment for an event."""

    def __init__(self, begun, awaited):
        super().__init__(4, 3)
        self.begun, self.awaited = begun, awaited

    def __deepcopy__(self, known):
        self.begun.set()
        self.awaited.wait(0.1)
        return nn.Linear(4, 3)


def test_copies_in_two_threads_leave_torchs_own_method():
    own = torch.Tensor.__deepcopy__
    first_begun, second_begun, first_ended = (threading.Event() for _ in range(3))

    def second():
        first_begun.wait()
        copy_of(Waits(second_begun, first_ended))

    thread = threading.Thread(target=second)
    thread.start()
    copy_of(Waits(first_begun, second_begun))
    first_ended.set()
    thread.join()
    assert torch.Tensor.__deepcopy__ is own
