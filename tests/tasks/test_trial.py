"""Networks and losses that cannot be trained: each is one line before anything is."""

import copy
import sys
import threading

import pytest
import torch
from torch import nn

from mpcompare.errors import InputError
from mpcompare.tasks.batch import Tree, tensors_of
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.trial import first_loss, fitted, try_out

CPU = torch.device("cpu")
X, Y = torch.randn(8, 3), torch.arange(8) % 4


def module_task(make, loss="cross_entropy"):
    return Task(make, loss, Sgd(0.1), batch_size=8)


def changed(**changes):
    """Returns a linear layer with other attributes."""
    layer = nn.Linear(3, 4)
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


class SparseRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(5, 4, sparse=True)

    def forward(self, x):
        return x + self.rows(torch.arange(len(x)) % 5)


class Averages(nn.Module):
    """Its second layer follows the first one, as a target network does."""

    def __init__(self):
        super().__init__()
        self.first, self.target = nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False)
        self.target.load_state_dict(self.first.state_dict())

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.target.weight.lerp_(self.first.weight, 0.1)
        return self.first(x) + self.target(x)


def test_a_network_that_writes_into_its_parameters_is_one_line():
    task = module_task(Averages)
    with pytest.raises(InputError, match=r"^task.model=Averages: writes into its parameter target.weight when it is c"):
        try_out(task.new_model(0, CPU), task, X, Y, "x")


class Shifts(nn.Linear):
    """It writes into its inputs, as ``nn.ReLU(inplace=True)`` does."""

    def __init__(self):
        super().__init__(3, 4)

    def forward(self, x, more=None):
        x -= 1
        return super().forward(x)


@pytest.mark.parametrize("x", [X, torch.full((8, 3), torch.nan), Tree({"x": X}), Tree((X, X))])
def test_a_network_that_writes_into_its_inputs_is_one_line_and_leaves_them_as_they_are(x):
    first, task = copy.deepcopy(x), module_task(Shifts)
    with pytest.raises(InputError, match=r"^task.model=Shifts: writes into its inputs when it is called: expected a c"):
        try_out(task.new_model(0, CPU), task, x, Y, "x")
    for before, after in zip(tensors_of(first), tensors_of(x), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True)


def test_an_input_that_is_written_with_its_own_numbers_is_written():
    task = module_task(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4)))
    with pytest.raises(InputError, match="task.model=Sequential: writes into its inputs"):
        fitted(task.new_model(0, CPU), task, X.abs(), Y)


def test_a_loss_that_writes_into_its_targets_is_one_line_and_leaves_them_as_they_are():
    def shifted(output, y):
        y[y == 3] = -100
        return nn.functional.cross_entropy(output, y)

    task, y = module_task(lambda: nn.Linear(3, 4), shifted), Y.clone()
    with pytest.raises(InputError, match=r"^task.loss=shifted: writes into its targets: expected a copy, such as y.c"):
        try_out(task.new_model(0, CPU), task, X, y, "x")
    assert torch.equal(y, Y)


def in_inference_mode():
    with torch.inference_mode():
        return nn.Linear(3, 4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.LazyLinear(4), "task.model=LazyLinear: parameter weight is lazy: expected a shape"),
        (lambda: changed(more=nn.Parameter(torch.zeros(0, 3))), r"parameter more is of shape \[0, 3\]"),
        (lambda: changed(more=nn.Parameter(torch.eye(3).to_sparse())), "more is torch.sparse_coo: expected"),
        (lambda: nn.Linear(3, 4, device="meta"), "parameter weight is on the device meta: expected numbers"),
        (in_inference_mode, "is made in torch.inference_mode"),
        (lambda: changed(lock=threading.Lock()), "task.model=Linear: cannot be copied .TypeError: cannot pickle"),
    ],
)  # fmt: skip
def test_a_network_that_nobody_can_train_is_one_line(make, said):
    with pytest.raises(InputError, match=said):
        module_task(make).new_model(0, CPU)


class Changed(nn.Linear):
    """A linear layer whose output is changed by a function of it and of the layer."""

    def __init__(self, change):
        super().__init__(3, 4)
        self.change = change

    def forward(self, x):
        return self.change(self, super().forward(x))


def grows(self, output):
    self.more = nn.Parameter(torch.zeros(4))
    return output + self.more


@pytest.mark.parametrize(
    ("change", "loss", "said"),
    [
        (
            lambda _, output: output.detach(),
            "cross_entropy",
            "Changed: returns an output without gradient: it is detach",
        ),
        (lambda *_: sys.exit(3), "cross_entropy", "cannot be called with data=d, inputs .4, 3. float32: Syst"),
        (grows, "cross_entropy", "task.model=Changed: makes its parameter more in forward"),
        (lambda _, output: output, lambda output, y: output.detach().sum(), "gives a value without gradient"),
        (lambda _, output: output, lambda output, y: sys.exit(3), "cannot be taken of .*: SystemExit: 3"),
    ],
)
def test_what_has_no_gradient_or_ends_the_program_is_one_line(change, loss, said):
    model = Changed(change)
    with pytest.raises(InputError, match=said):
        try_out(model, module_task(lambda: model, loss), X, Y, "d")


def test_a_sparse_gradient_is_one_line():
    task = module_task(lambda: nn.Sequential(nn.Linear(3, 4), SparseRows()))
    with pytest.raises(
        InputError, match=r"task.model=Sequential: 1.rows.weight has a sparse gradient: expected sparse="
    ):
        try_out(task.new_model(0, CPU), task, X, Y, "mine")


def test_labels_of_the_held_out_samples_are_checked_too():
    model = nn.Linear(3, 4)
    with pytest.raises(InputError, match="labels go up to 7"):
        try_out(model, module_task(lambda: model), X, Y, "d", torch.arange(8))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "the first loss of Changed is nan: its output for x_train, sample 5 is not finite"),
        (float("inf"), "the first loss of Changed is nan: its output for x_train, sample 5 is not finite"),
        (1.0, ""),
    ],
)
def test_an_output_that_is_not_finite_is_named(value, said):
    def change(_, output):
        return output.index_fill(0, torch.tensor([5]), value) if len(output) > 5 else output

    model = Changed(change)
    assert first_loss(model, module_task(lambda: model), X, Y) == said
