"""READ FIRST. The contract: a training step is five phases, and a backend is one column of this table.

    phase           fp32              amp                              scratch
    forward(x, y)   plain module      autocast                         cast masters -> params, gemms, loss in fp32
    backward()      loss.backward()   scaler.scale(loss).backward()    dlogits *= loss scale, then gemms
    unscale()       -                 scaler.unscale_(optimizer)       grads -> fp32, times inv_scale, set found_inf
    step()          optimizer         scaler.step(optimizer)           optimizer on the masters unless found_inf
    update()        zero_grad         scaler.update(), zero_grad       grow or back off, drop the gradients

The harness calls the five in this order and nothing else inside the timed region. An implementation that is one piece
(a CUDA graph, a compiled step, an engine of somebody else's) offers ``train_step(x, y)`` instead of the five.

The harness owns the data, the clock and the records; a backend owns its parameters and how it computes. There is no
base class: same constructor, same method names in the same order. What two backends do differently is the comparison,
and is written twice. What backends on a torch module answer alike is written once, in ``backends/torch_model.py``.

To add a backend: copy the file that is closest to ``mpcompare/backends/X.py``, add ``conf/backend/X.yaml`` with its
``_target_``, and a row to the table of backends in the README. Every other key of that file is an option: a keyword
argument of the backend's constructor. One in a package of its own needs a class and an entry point:
see ``mpcompare/testing.py``.
"""

import inspect
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from mpcompare.errors import BackendUnavailable as BackendUnavailable
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Params, Task

PHASES = ("forward", "backward", "unscale", "step", "update")
MemoryModel = dict[str, dict[str, int]]
ModuleDtypes = dict[str, dict[str, str]]


class Backend(Protocol):
    """One implementation of the task, with either the phases (:class:`Phased`) or the step (:class:`WholeStep`).

    Attributes:
        PRECISIONS: accepted values of ``precision``; the first is the default where it does not depend on the device.
        engine: what computes the matrix products: ``torch``, or ``native`` for this project's own operators.
        skipped: whether the last step left the parameters alone because its gradients held inf or NaN: a bool,
            or a 0-d tensor on the device that is not 0 then (reading it may wait).
    """

    PRECISIONS: ClassVar[tuple[str, ...]]
    engine: str
    skipped: bool | Tensor

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale, **options: Any) -> None:
        """Builds everything that outlives a step, on the device of ``model``.

        Args:
            model: the network with its initial fp32 weights, in training mode; shared with other backends, so copied
                here, never written.
            task: loss, optimizer and batch size.
            precision: one of ``PRECISIONS``, resolved (never ``auto``).
            loss_scale: a fresh policy, owned by this backend from now on.
            options: this backend's own, by name and with defaults; most have none.

        Raises:
            InputError: a combination that this backend cannot do.
            BackendUnavailable: something optional is missing, or this kind of network cannot be trained.
        """

    def master_params(self) -> Params:
        """The fp32 parameters that the optimizer updates, under the names of ``model.named_parameters()``."""

    def buffers(self) -> Params:
        """The network's buffers after the last step (running statistics), under ``model.named_buffers()``'s names."""

    def grads(self) -> Params:
        """The unscaled fp32 gradients, named as the parameters; valid from ``unscale()`` to ``update()``, and after
        ``train_step()`` until the next one. Empty where they cannot be seen."""

    def loss_scale(self) -> float | Tensor:
        """The scale that the next step will use: a number, or a 0-d tensor on the device (reading it may wait)."""

    def dtypes(self) -> dict[str, str]:
        """Observed in the last step, not requested: dtypes of params, activations, gradients, loss, optimizer."""

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        """Where each precision runs: what one step with a batch is seen to do in each layer, in the order of their
        calls. Asked of a backend that does nothing else. Empty where it cannot be looked into.

        Returns:
            ``{layer: row}``, the layer under its name in the module, and ``(loss)``. Of a row ``kind`` is the module's
            class; the others are dtypes, ``+`` between several, ``-`` where there is none: ``master``, the weight that
            the optimizer updates; ``weight``, the one that the layer holds; ``input`` and ``output``; ``computes`` and
            ``backward``, its arithmetic in forward and in backward; ``gradient``, that of the loss by ``output``.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on: parameters, buffers, optimizer state, loss scale state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`, bit for bit."""

    def memory_model(self) -> MemoryModel:
        """Bytes of every tensor that is live at a step's peak: ``{kind: {tensor: bytes}}``, the kinds those of
        ``mpcompare.cost.memory.TENSOR_KINDS``; empty if unknown."""


class Phased(Protocol):
    """A backend that lets itself be looked into.

    Attributes:
        IDLE_PHASES: those of ``PHASES`` that hold no work here: none is needed, or another phase does it.
    """

    IDLE_PHASES: tuple[str, ...]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss of the batch, an fp32 scalar on the device, unscaled."""

    def backward(self) -> None:
        """Gradients of the scaled loss."""

    def unscale(self) -> None:
        """Divides the gradients by the loss scale, in fp32, and looks for inf and NaN."""

    def step(self) -> None:
        """Updates the fp32 master parameters, or skips; sets ``skipped``."""

    def update(self) -> None:
        """Sets the loss scale of the next step and drops the gradients."""


class WholeStep(Protocol):
    """A backend whose step is one piece."""

    def train_step(self, x: Tensor, y: Tensor) -> Tensor:
        """A whole step; returns the loss of the batch, an fp32 scalar on the device, unscaled."""


def take_step(backend: Any, x: Tensor, y: Tensor) -> Tensor:
    """One training step, by phases or in one piece. Returns the loss."""
    if hasattr(backend, "train_step"):
        return backend.train_step(x, y)
    loss = backend.forward(x, y)
    backend.backward()
    backend.unscale()
    backend.step()
    backend.update()
    return loss


def show_gradients(backend: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Params]:
    """A step up to where its gradients can be seen, which in one piece is all of it.

    Returns the loss and the gradients, which the rest of the step may overwrite.
    """
    if hasattr(backend, "train_step"):
        loss = backend.train_step(x, y)
    else:
        loss = backend.forward(x, y)
        backend.backward()
        backend.unscale()
    return loss, backend.grads()


def options_of(make_backend: type[Backend]) -> list[str]:
    """The names of a backend's own options: what its constructor takes beyond what all backends take."""
    common = inspect.signature(Backend.__init__).parameters
    return [name for name in inspect.signature(make_backend).parameters if name not in common]
