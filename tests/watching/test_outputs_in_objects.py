"""Networks that return objects that torch's pytree does not open: the tensors within are outputs."""

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from support.watched_loops import spoil
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn import functional as F

import mpcompare
from mpcompare.verdict.examine.forced.record import leaves_of


@dataclass(frozen=True, slots=True)
class Output:
    logits: Tensor


class EasyDict(dict):
    __getattr__ = dict.__getitem__


class Net(nn.Module):
    """Returns logits and a value of the state in some nest."""

    def __init__(self, make):
        super().__init__()
        self.body, self.head, self.value = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.make, self.more = make, 1.0

    def forward(self, x):
        h = self.body(x).tanh()
        logits = self.head(h).tanh() * (self.more if x.dtype is torch.float64 else 1.0)
        return self.make(logits, self.value(h))


def train(loop, model, updates=1):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(updates):
            loop(model(torch.randn(6, 4)), torch.randint(3, (6,))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


OBJECTS = {
    "a dataclass": (lambda z, v: Output(z), lambda o, y: F.cross_entropy(o.logits, y)),
    "a subclass of dict": (lambda z, v: EasyDict(z=z), lambda o, y: F.cross_entropy(o.z, y)),
    "a tensor and a distribution": (
        lambda z, v: (v, Categorical(logits=z)),
        lambda o, y: o[0].square().mean() - o[1].log_prob(y).mean(),
    ),
    "a distribution of another": (
        lambda z, v: Independent(Normal(z, v.exp()), 1),
        lambda o, y: o.rsample().square().mean() - o.log_prob(torch.ones(6, 3)).mean(),
    ),
    "written into": (lambda z, v: SimpleNamespace(z=z), lambda o, y: F.cross_entropy(o.z.mul_(2), y)),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_the_layers_of_a_network_that_returns_an_object_are_examined(name):
    make, loop = OBJECTS[name]
    seen = train(loop, Net(make))
    assert seen.defects == []
    assert seen.not_examined == []
    assert str(seen).startswith("no defect in 1 update: 3 of 3 layers")


@pytest.mark.parametrize("wrong", ["gradient", "output"])
def test_what_is_wrong_is_found_in_a_network_that_returns_an_object(wrong):
    make, loop = OBJECTS["a dataclass"]
    model = Net(make)
    if wrong == "gradient":
        spoil(model.body.weight, lambda g: 1.01 * g)
    else:
        model.more = 1.001
    (defect,) = train(loop, model).defects
    says = {"gradient": "the gradients of body.weight are 1.01 times", "output": "the output of the network in update"}
    assert says[wrong] in str(defect)


def test_the_leaves_of_a_nest_come_before_the_tensors_in_its_objects_by_name_and_each_once():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    held = SimpleNamespace(z=b, y=[c, Output(b)], module=nn.Linear(1, 1))
    nest = [a, held, 3]
    assert [getattr(leaf, "shape", leaf) for leaf in leaves_of(nest)] == [a.shape, held, 3, c.shape, b.shape]


class Raising:
    """Some configurations raise no AttributeError where they have no such attribute."""

    __slots__ = ("missing", "tensor")

    def __getattr__(self, name):
        raise RuntimeError(name)


class Counted(list):
    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


class Named(OrderedDict):
    def __init__(self, *, logits):
        super().__init__(logits=logits)
        self.more = torch.ones(3)


def test_an_object_that_is_a_dict_is_not_made_anew():
    assert [len(t) for t in leaves_of(Named(logits=torch.ones(2)))[1:]] == [2, 3]


def test_an_object_is_read_once_and_asked_for_no_attribute_that_it_has_not():
    raising, counted = Raising(), Counted([torch.ones(1)])
    raising.tensor = torch.ones(2)
    held = SimpleNamespace(raising=raising, **{f"again_{number}": counted for number in range(9)})
    assert [len(t) for t in leaves_of(held)[1:]] == [1, 2]
    assert counted.reads == 1
