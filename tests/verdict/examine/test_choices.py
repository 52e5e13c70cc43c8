"""The choices of a network: noted in a step, and made again by its replay where the numbers agree."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torchvision.ops import nms

from mpcompare.verdict.examine.forced.choices import Choosing
from mpcompare.verdict.examine.forced.random_numbers import Fed
from mpcompare.verdict.examine.forced.record import OUTPUT, Call
from mpcompare.verdict.examine.forced.recorder import recorded

NEAR = 0.1
X = torch.tensor([[1.0, 3.0, 3.001, -2.0]], dtype=torch.float64)
NEARLY = torch.tensor([[1.0, 3.001, 3.0, -2.0]], dtype=torch.float64)  # the second and the third change places
FAR = torch.tensor([[9.0, 3.0, 3.001, -2.0]], dtype=torch.float64)
BOXES = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 5.1], [20, 20, 30, 30]])


class Chooses(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(1, 1), function

    def forward(self, x):
        return self.layer(torch.zeros(1, 1)), self.function(x)


def choices_of(function, step):
    """Returns the choices that are noted of a network that calls a function between its layers."""
    net = Chooses(function)
    with recorded(net) as record:
        net(step)
    return record.calls[OUTPUT][0].choices


def again(function, step, replay, aside=False):
    """Returns the result of a function of the replay's numbers, with the choices that it made of the step's numbers."""
    choosing = Choosing()
    within = choosing.within() if aside else nullcontext()
    with choosing.of(choices_of(function, step), NEAR), Fed({}, choosing=choosing), within:
        return function(replay)


CHOOSE = {
    "topk": lambda x: x.topk(1).indices,
    "sort": lambda x: x.sort(descending=True).indices,
    "max": lambda x: x.max(1).indices,
    "argmax": lambda x: x.argmax(1),
    "argmax of all": lambda x: x.argmax(),
    "greater": lambda x: x > 3.0005,
    "rounded": lambda x: (1000 * x).round().long(),
}


@pytest.mark.parametrize("name", CHOOSE)
def test_numbers_that_nearly_agree_have_the_choice_of_the_step(name):
    function = CHOOSE[name]
    assert not torch.equal(function(X), function(NEARLY))
    assert torch.equal(again(function, X, NEARLY), function(X))
    assert torch.equal(again(function, X, NEARLY, aside=True), function(NEARLY))


@pytest.mark.parametrize("name", [name for name in CHOOSE if name != "rounded"])
def test_another_choice_stays(name):
    assert torch.equal(again(CHOOSE[name], X, FAR), CHOOSE[name](FAR))


class Mode(TorchFunctionMode):
    """Calls each function as it is, as the mode of a backend calls most functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_the_place_of_a_choice_is_not_in_a_mode_of_the_backend():
    function = CHOOSE["topk"]
    (plain,) = choices_of(function, X)
    with Mode():
        (within,) = choices_of(function, X)
    assert within.place == plain.place


def test_the_values_are_those_of_the_replay():
    values, places = again(lambda x: x.topk(2), X, NEARLY)
    assert places.tolist() == [[2, 1]]
    assert values.tolist() == [[3.0, 3.001]]


def test_boxes_that_overlap_a_little_less_are_kept_as_in_the_step():
    scores = torch.tensor([3.0, 2.0, 1.0])
    wider = BOXES + torch.tensor([0.0, 0, 0, -0.2])
    assert nms(BOXES, scores, 0.505).tolist() == [0, 2]
    assert nms(wider, scores, 0.505).tolist() == [0, 1, 2]
    assert again(lambda boxes: nms(boxes, scores, 0.505), BOXES, wider).tolist() == [0, 2]


def test_a_network_may_write_into_its_choices():
    def function(x):
        which = x.argmax(1)
        found = which.clone()
        which[:] = -1
        return found

    choices, choosing = choices_of(function, X), Choosing()
    for _ in range(2):
        with choosing.of(choices, NEAR), Fed({}, choosing=choosing):
            assert function(NEARLY).tolist() == [2]


def test_the_choices_of_a_line_come_in_their_order():
    def both(x):
        return [(sign * x).argmax(1).item() for sign in (1, -1)]

    assert again(both, X, NEARLY) == both(X) == [2, 3]


ROW = torch.tensor([[1.0, 3.0, 3.001, float("-inf"), -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("recorded", "taken"),
    [
        ([[1, 2]], [[1, 2]]),  # bf16 does not tell the two apart
        ([[1, 4]], [[2, 1]]),  # a choice that no rounding makes
        ([[2, 3]], [[2, 1]]),  # one that was masked
        ([[2, 0]], [[2, 1]]),
    ],
)
def test_a_layer_that_is_a_router_chooses_the_places_that_it_returned(recorded, taken):
    call = Call([ROW.bfloat16()], [torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor(recorded)])
    row, choosing = ROW.clone().requires_grad_(), Choosing()
    with Fed({}, choosing=choosing), choosing.within(call.places, call.near):
        values, places = row.topk(2)
        assert torch.equal(row.argmax(1), torch.tensor([2]))  # other choices within a layer are its own
    assert places.tolist() == taken
    assert torch.equal(values, ROW.gather(1, places))
    values.sum().backward()
    assert row.grad.nonzero()[:, 1].tolist() == sorted(taken[0])
