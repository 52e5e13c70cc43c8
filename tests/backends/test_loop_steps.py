"""A step that is a function updates by the optimizer that it is given."""

import pytest
import torch
from support.unusual import Adapted, task_of

from mpcompare.backends.loop import backend_of
from mpcompare.errors import InputError
from mpcompare.loss_scale import NoLossScale


def within_backward(model, optimizer, batch):
    """Updates each weight as soon as its gradient is there."""
    x, y = batch
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
                p.grad = None
    return loss


def without_a_step(model, optimizer, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)


def test_weights_that_move_without_the_optimizer_are_one_line():
    task, data = task_of(Adapted)
    model = task.new_model(0, torch.device("cpu"))
    batches = [(data.x_train[:32], data.y_train[:32])]
    backend = backend_of(within_backward)(model, task, "fp32", NoLossScale())
    with pytest.raises(InputError, match=r"backend=within_backward: moves weights without optimizer.step"):
        backend.train_step(batches, 0.1)
    assert backend_of(without_a_step)(model, task, "fp32", NoLossScale()).train_step(batches, 0.1) > 0
