"""The loop as people write it, a function ``step(model, optimizer, batch)``, as a backend whose step is one piece.

The function has its own autocast, backward and ``optimizer.step()``, and returns the loss. A function with an argument
``scaler`` gets a ``torch.amp.GradScaler`` of the run's loss scale. The step's gradients are the tensors with which the
optimizer, or the scaler, is called: hooks of both note which tensors they are, and copy them only where the function
writes into them afterwards. A function that clips its gradients calls ``torch.nn.utils.clip_grad_norm_``. The norm
before clipping is noted there.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from mpcompare.backends.amp import grad_scaler
from mpcompare.backends.torch_model import TorchModel, require_kernels, set_lr
from mpcompare.contract import Batches
from mpcompare.errors import InputError
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.batch import Batch, Tree, tree_of, without_doors
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.task import Params, Task


class Loop(TorchModel):
    """The base of the classes that :func:`backend_of` makes."""

    PRECISIONS: tuple[str, ...] = ("fp16", "bf16", "fp32", "tf32")
    function: ClassVar[Callable[..., Any]]

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        self.name = type(self).__name__
        if task.accumulate > 1:
            expected = f"backend={self.name} is given the whole batch, and accumulates by itself: leave it out"
            raise InputError("task.accumulate", task.accumulate, expected)
        self.task, self.device_type = task, next(model.parameters()).device.type
        require_kernels(model, self.device_type, precision, self.name)
        self.model = without_doors(copy_of(model))
        self.optimizer = task.optimizer.make(self.model.named_parameters())
        self.optimizer.register_step_pre_hook(self._note)
        self.optimizer.register_step_post_hook(self._stepped)
        self.more: dict[str, Any] = {}
        if takes_scaler(self.function):
            self.scaler = grad_scaler(loss_scale, self.device_type)
            step = self.scaler.step

            def noted(*args: Any, **kwargs: Any) -> Any:
                self._note()
                result = step(*args, **kwargs)
                self._keep()
                return result

            self.scaler.step = noted  # type: ignore[method-assign]
            self.more = {"scaler": self.scaler}
        self.model.register_forward_hook(self._returned)
        self.skipped: bool | Tensor = False
        self.observed = {}
        self._grads: Params = {}
        self._writes = True  # the function writes into gradients after its update; the first step tells
        self._keep()
        self._norm: Tensor | None = None
        self._tried = False  # a first step was taken

    def train_step(self, batches: Batches, lr: float | Tensor) -> Tensor:
        set_lr(self.optimizer, lr)
        self._grads, self._norm, self.skipped = {}, None, True
        before = [] if self._tried else [p.detach().clone() for p in self.model.parameters()]
        with self._noting_the_norm():
            loss = type(self).function(self.model, self.optimizer, as_given(*batches[0]), **self.more)
        if not isinstance(loss, (Tensor, float)):
            raise InputError("backend", self.name, f"returned a {type(loss).__name__}: expected the loss of the step")
        if not self._grads:
            self._note()
            self._keep()
        self._writes = self._versions != [g._version for g in self._grads.values()]
        if self._writes:
            self._grads = self._copies
        self._tried = True
        if self.skipped is True and not all(map(torch.equal, before, self.model.parameters())):
            expected = "moves weights without optimizer.step(): expected a step of the optimizer that it is given"
            raise InputError("backend", self.name, expected)
        loss = torch.as_tensor(loss).detach()
        self.observed["loss"] = loss.dtype
        return loss.float()

    def grads(self) -> Params:
        return self._grads

    @property
    def grad_norm(self) -> Tensor | None:  # type: ignore[override]  # a value where others have an attribute
        """The norm before clipping, in fp32; None where the task does not clip. Where nobody has clipped, it is the
        norm of the gradients. Raises InputError where the function has clipped by hand: nobody sees the norm before
        that."""
        if self.task.clip_norm is None:
            return None
        norm = self._norm
        if norm is None:
            norm = nn.utils.get_total_norm(list(self._grads.values()), self.task.clip_norm_type)
            if abs(float(norm) / self.task.clip_norm - 1) < 1e-3:  # roundings change a norm by far less
                expected = f"backend={self.name} clips by hand, and nobody sees the norm before: expected "
                raise InputError("task.clip_norm", self.task.clip_norm, expected + "torch.nn.utils.clip_grad_norm_")
        return norm.float()

    @contextmanager
    def _noting_the_norm(self) -> Iterator[None]:
        """Notes the norm with which torch's function clips, whatever name the loop gives it. Raises InputError where
        the loop clips, and the task does not."""
        clip = clip_grad._clip_grads_with_norm_

        def noted(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> None:
            if self.task.clip_norm is None:
                expected = f"expected task.clip_norm={max_norm:g}, as all must clip"
                raise InputError("task.clip_norm", None, f"backend={self.name} clips to {max_norm:g}: {expected}")
            self._norm = total_norm
            clip(parameters, max_norm, total_norm, *args, **kwargs)

        clip_grad._clip_grads_with_norm_ = noted
        try:
            yield
        finally:
            clip_grad._clip_grads_with_norm_ = clip

    def loss_scale(self) -> float | Tensor:
        return super().loss_scale() if self.more else 1.0

    def _note(self, *_: object) -> None:
        self._grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for gradient in self._grads.values():
            self.observed["gradients"] = gradient.dtype

    def _stepped(self, *_: object) -> None:
        self.skipped = getattr(self.optimizer, "found_inf", False)
        self._keep()

    def _keep(self) -> None:
        """Copies the gradients where the function may still write into them, as ``zero_grad(set_to_none=False)``."""
        self._versions = [g._version for g in self._grads.values()]
        self._copies = {name: g.clone() for name, g in self._grads.items()} if self._writes else {}

    def _returned(self, _: nn.Module, __: Any, output: Any) -> None:
        self.observed["activations"] = tree_of(output).dtype


def backend_of(function: Callable[..., Any]) -> type[Loop]:
    """Returns the backend of a step, under the name of the function. Raises InputError where the function cannot be
    called with a model, an optimizer and a batch."""
    name = function.__name__
    takes_scaler(function)
    space = {"function": staticmethod(function), "__module__": function.__module__, "__doc__": function.__doc__}
    return type(name if name.isidentifier() else "step", (Loop,), space)


def takes_scaler(function: Callable[..., Any]) -> bool:
    """Returns whether a step has an argument ``scaler``. Raises InputError where it takes other arguments, or uses a
    scaler that all of its backends would share."""
    name, signature = function.__name__, inspect.signature(function)
    write = "write def step(model, optimizer, batch), or (model, optimizer, batch, scaler)"
    scaler = {"scaler": None} if "scaler" in signature.parameters else {}
    try:
        signature.bind(None, None, None, **scaler)
    except TypeError:
        raise InputError("backends", name, f"takes {signature}: {write}") from None
    used = inspect.getclosurevars(inspect.unwrap(function))
    for own, value in {**used.globals, **used.nonlocals}.items():
        if isinstance(value, torch.amp.GradScaler):
            raise InputError("backends", name, f"uses {own}, a GradScaler of the whole program: {write}")
    return bool(scaler)


def as_given(x: Batch, y: Batch) -> Any:
    """Returns a batch as a loader gives it: a dict, or a tuple of inputs and targets."""
    targets = y.value if isinstance(y, Tree) else y
    if isinstance(x, Tree) and isinstance(x.value, dict):
        return {**x.value, **targets} if isinstance(targets, dict) else (x.value, targets)
    inputs = tuple(x.value) if isinstance(x, Tree) else (x,)
    return (*inputs, targets)
