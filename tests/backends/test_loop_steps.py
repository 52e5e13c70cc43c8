"""A step that is a function updates by the optimizer that it is given."""

from dataclasses import replace

import pytest
import torch
from support.unusual import Adapted, task_of
from torch.nn.utils import clip_grad_norm_

from mpcompare.backends.loop import as_given, backend_of
from mpcompare.errors import InputError
from mpcompare.loss_scale import DynamicLossScale, NoLossScale
from mpcompare.tasks.batch import Tree


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


def with_gradients(model, optimizer, batch):
    """Returns the loss; the model has its gradients."""
    x, y = batch
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def clips(model, optimizer, batch):
    loss = with_gradients(model, optimizer, batch)
    clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return loss


def clips_by_hand(model, optimizer, batch):
    loss = with_gradients(model, optimizer, batch)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in grads]).norm()
    for g in grads:
        g.mul_((0.01 / (norm + 1e-6)).clamp(max=1))
    optimizer.step()
    return loss


def clips_nothing(model, optimizer, batch):
    loss = with_gradients(model, optimizer, batch)
    optimizer.step()
    return loss


def backend_that(function, clip_norm):
    task, data = task_of(Adapted)
    task = replace(task, clip_norm=clip_norm)
    batches = [(data.x_train[:32], data.y_train[:32])]
    return backend_of(function)(task.new_model(0, torch.device("cpu")), task, "fp32", NoLossScale()), batches


def test_the_norm_before_clipping_is_noted():
    norms = {}
    for function in (clips, clips_nothing):
        backend, batches = backend_that(function, 0.01)
        backend.train_step(batches, 0.1)
        norms[function] = float(backend.grad_norm)
        after = torch.nn.utils.get_total_norm(list(backend.grads().values()))
        assert (float(after) == pytest.approx(0.01, rel=1e-3)) == (function is clips)
    assert norms[clips] == pytest.approx(norms[clips_nothing], rel=1e-6)
    assert norms[clips] > 0.1


def test_a_step_that_clips_where_the_task_does_not_is_one_line():
    backend, batches = backend_that(clips, None)
    with pytest.raises(
        InputError, match=r"task.clip_norm=None: backend=clips clips to 0.01: expected task.clip_norm=0.01"
    ):
        backend.train_step(batches, 0.1)


def test_a_step_that_clips_by_hand_is_one_line():
    backend, batches = backend_that(clips_by_hand, 0.01)
    backend.train_step(batches, 0.1)
    with pytest.raises(InputError, match=r"task.clip_norm=0.01: backend=clips_by_hand clips by hand"):
        _ = backend.grad_norm


def zeroes_at_its_end(model, optimizer, batch):
    loss = with_gradients(model, optimizer, batch)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def zeroes_after_a_scaler(model, optimizer, batch, scaler):
    x, y = batch
    loss = torch.nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)
    return loss


@pytest.mark.parametrize("function", [zeroes_at_its_end, zeroes_after_a_scaler])
def test_gradients_that_a_step_zeroes_at_its_end_are_shown(function):
    task, _ = task_of(Adapted)
    reference, batches = backend_that(clips_nothing, None)
    scaling = NoLossScale() if function is zeroes_at_its_end else DynamicLossScale(256.0)
    backend = backend_of(function)(task.new_model(0, torch.device("cpu")), task, "fp32", scaling)
    for _ in range(2):
        reference.train_step(batches, 0.1)
        backend.train_step(batches, 0.1)
        assert backend.grads().keys() == reference.grads().keys()
        for name, gradient in reference.grads().items():
            torch.testing.assert_close(backend.grads()[name], gradient)
            assert gradient.abs().max() > 0
    owned = {id(p.grad) for p in reference.model.parameters()}
    assert {id(g) for g in reference.grads().values()} <= owned  # nothing is copied where nobody writes


def test_a_batch_is_given_as_its_loader_has_it():
    x, y, z = torch.zeros(3, 1)
    assert as_given(Tree({"x": x}), Tree({"y": y})) == {"x": x, "y": y}
    assert as_given(Tree({"x": x}), Tree((y, z))) == ({"x": x}, (y, z))
    assert as_given(Tree({"x": x}), y) == ({"x": x}, y)
    assert as_given(Tree((x, y)), z) == (x, y, z)
    assert as_given(x, Tree([y, z])) == (x, [y, z])
