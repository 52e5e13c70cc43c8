"""The trial of a task: a network, its loss and its data are called before anything is trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.errors import InputError, first_line
from mpcompare.tasks.batch import Batch, OfTrees, Tree, returns_trees, take_trees, tensors_of, tree_of
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.draws import EXAMINED, as_examined, random_operators, seed_step, state
from mpcompare.tasks.losses import MaskedCrossEntropy, shares
from mpcompare.tasks.task import Task


def try_out(model: nn.Module, task: Task, x: Batch, y: Batch, data: str, y_test: Batch | None = None) -> None:
    """Calls a copy of the network and the loss on a few samples, so that a task that cannot work fails before training.
    Raises InputError where the batch is larger than the data, the network cannot be called with it, or the loss is no
    scalar or has no gradient. So it does where nobody could repeat the output, or it is random in evaluation mode.
    ``x`` and ``y`` are all training samples of the data set named ``data``, ``y_test`` its held-out targets."""
    if task.batch_size > len(x):
        raise InputError("task.batch_size", task.batch_size, f"data={data} has only {len(x)} samples")
    few, targets = x[:4].clone(), y[:4].clone()
    name = type(model).__name__
    model = copy_of(model)
    task = fitted(model, task, x, y)
    with as_examined(x.device):
        with torch.no_grad():
            output = _try_network(model, few, name, f"data={data}, inputs {_shape(few)}")
        _try_loss(task, output, targets, [y] if y_test is None else [y, y_test], data)
        _try_backward(model, task, few, targets, name)


def fitted(model: nn.Module, task: Task, x: Batch, y: Batch) -> Task:
    """Lets a network take and return nests of tensors where its data and its own output are nests. Returns the task
    with a loss that takes them. Raises InputError where the loss is of one tensor, and the network returns several, or
    there are several targets. So it does where the network writes into its inputs."""
    take_trees(model, isinstance(x, Tree), outputs=False)
    name, few = type(model).__name__, x[:4].clone()
    with as_examined(x.device), torch.no_grad():
        try:
            output = copy_of(model)(few)
        except (Exception, SystemExit):
            return task  # ``try_out`` says why
    if _is_written(few):
        expected = "expected a copy of them, such as x.clone(), and no inplace=True"
        raise InputError("task.model", name, f"writes into its inputs when it is called: {expected}")
    nest = not isinstance(output, Tensor | Tree)
    if not nest and not returns_trees(model) and not isinstance(y, Tree):
        return task
    if nest and not tree_of(output).tensors:
        raise InputError("task.model", name, f"returns a {type(output).__name__}: expected tensors")
    take_trees(model, False, nest)
    if isinstance(task.loss, OfTrees):
        return task
    if isinstance(task.loss, str) and task.loss != "model":
        what = f"{name} returns a {type(output).__name__}" if nest else "there are several targets"
        expected = f"{what}: expected model, where the output has a loss, or a function of output and targets"
        raise InputError("task.loss", task.loss, expected)
    return replace(task, loss=OfTrees(task.loss_fn, _loss_name(task)))


def _try_network(model: nn.Module, few: Batch, name: str, given: str) -> Any:
    """Returns the output for a few samples, in training mode."""
    own, fresh = [where for where, _ in model.named_parameters()], copy_of(model)
    try:
        # The second call begins in the state of the first: a call may move statistics, a queue, or a count.
        (output, _), (again, _) = (_called(network, few) for network in (copy_of(model), model))
    except (Exception, SystemExit) as error:
        raise InputError("task.model", name, f"cannot be called with {given}: {first_line(error)}") from error
    if new := [where for where, _ in model.named_parameters() if where not in own]:
        raise InputError("task.model", name, f"makes its parameter {new[0]} in forward: expected it from the start")
    if moved := _moved(fresh, few):
        expected = "expected a buffer, which a network may move"
        raise InputError("task.model", name, f"writes into its parameter {moved[0]} when it is called: {expected}")
    alike = map(torch.equal, tensors_of(output), tensors_of(again))
    if not all(alike) and not any(t.isnan().any() for t in tensors_of(output)):
        expected = "draws random numbers that torch.manual_seed does not repeat: expected torch's own"
        raise InputError("task.model", name, expected)
    # A network that makes layers in its first call draws their weights there, and so draws other masks afterwards.
    if _called(fresh, few)[1] != _called(model, few)[1]:
        expected = "draws other random numbers in its first call than in later ones: call it once where it is made"
        raise InputError("task.model", name, expected)
    if any("dropout" in drawn or "bernoulli" in drawn for drawn in random_operators(lambda: model.eval()(few))):
        expected = "drops numbers in evaluation mode, too: F.dropout wants training=self.training"
        raise InputError("task.model", name, expected)
    model.train()
    return output


def _moved(model: nn.Module, few: Batch) -> list[str]:
    """Returns the parameters that a call writes into. Each is multiplied by another factor first: a target network
    begins as a copy of the network that it follows."""
    model, many = copy_of(model), max(1024, len(list(model.parameters())))
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.mul_(1 + number / many)
        before = {name: p.nan_to_num() for name, p in model.named_parameters()}
        try:
            _called(model, few)
        except (Exception, SystemExit):  # the network may fail at other weights
            return []
        return [name for name, p in model.named_parameters() if not torch.equal(p.nan_to_num(), before[name])]


def _try_loss(task: Task, output: Any, targets: Batch, every: Sequence[Any], data: str) -> None:
    both = f"data={data}, output {_shape(output)}, targets {_shape(targets)}"
    try:
        if task.loss in ("cross_entropy", "masked_cross_entropy"):
            for y in every:
                if not y.is_floating_point():
                    _check_classes(y, output.shape[-1], masked=task.loss == "masked_cross_entropy")
        with torch.no_grad():
            loss = task.loss_fn(output, targets)
        if parts := shares(task.loss_fn, [targets, targets]):
            float(parts[0])
    except (Exception, SystemExit) as error:
        raise InputError("task.loss", _loss_name(task), f"cannot be taken of {both}: {first_line(error)}") from error
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError("task.loss", _loss_name(task), f"gives {found} for {both}: expected a scalar")
    if _is_written(targets):
        raise InputError("task.loss", _loss_name(task), "writes into its targets: expected a copy, such as y.clone()")


def _try_backward(model: nn.Module, task: Task, few: Batch, targets: Batch, name: str) -> None:
    output = model(few)
    if not output.requires_grad:
        expected = "returns an output without gradient: it is detached, or no parameter is used"
        raise InputError("task.model", name, expected)
    loss = task.loss_fn(output, targets)
    if not loss.requires_grad:
        raise InputError("task.loss", _loss_name(task), "gives a value without gradient: is it detached, or a number?")
    try:
        loss.backward()
    except Exception as error:
        raise InputError("task.model", name, f"has a backward that fails: {first_line(error)}") from error
    for where, p in model.named_parameters():
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise InputError("task.model", name, f"{where} has a sparse gradient: expected sparse=False")


def first_loss(model: nn.Module, task: Task, x: Batch, y: Batch) -> str:
    """Returns why the network's loss on the first batch, in fp32, is no finite number; nothing where it is finite.
    ``x`` and ``y`` are the samples of the batch, the first of the training samples."""
    model, first = copy_of(model), 0
    with as_examined(x.device), torch.no_grad():
        for few, targets in task.micro_batches(x, y):
            seed_step(EXAMINED)
            output = model(few)
            loss = task.loss_fn(output, targets)
            if not bool(loss.isfinite()):
                said = f"the first loss of {type(model).__name__} is {float(loss):g}"
                one = isinstance(output, Tensor) and len(output) == len(few)
                rows = output.reshape(len(few), -1) if one else loss.new_zeros(1, 1)
                wrong = (rows.isnan() | rows.isposinf()).any(dim=1).nonzero()
                where = f": its output for x_train, sample {first + int(wrong[0])} is not finite" if len(wrong) else ""
                return said + where
            first += len(few)
    return ""


def _loss_name(task: Task) -> str:
    own = getattr(getattr(task.loss, "func", task.loss), "__name__", type(task.loss).__name__)
    return task.loss if isinstance(task.loss, str) else own


def _called(network: nn.Module, x: Batch) -> tuple[Any, str]:
    """Calls a network with the random numbers of an examined step. Returns its output, and the state of torch's
    generators afterwards."""
    seed_step(EXAMINED)
    return network(x), state(x.device)


def _check_classes(y: Tensor, classes: int, masked: bool) -> None:
    """Raises ValueError where a label is not among so many classes."""
    counted = y[y != MaskedCrossEntropy.ignored] if masked else y
    if not len(counted):
        raise ValueError("every label is left out")
    least, most = int(counted.min()), int(counted.max())
    if most >= classes:
        raise ValueError(f"labels go up to {most}, and the last dimension of the output has {classes} classes")
    if least < 0:
        raise ValueError(f"a label is {least}, and masked_cross_entropy leaves out labels of -100")


def _is_written(batch: Batch) -> bool:
    """Returns whether a call has written into a new batch, even if the numbers are the same."""
    return any(t._version for t in tensors_of(batch))


def _shape(batch: Batch) -> str:
    shapes = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors_of(batch))
    return " and ".join(shapes)
