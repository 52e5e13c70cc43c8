"""READ FIRST. The contract: a training step is six phases, and a backend is one column of this table.

    phase           fp32              amp                              scratch
    forward(x, y)   plain module      autocast                         cast masters -> params, gemms, loss in fp32
    backward()      loss.backward()   scaler.scale(loss).backward()    dlogits *= loss scale, then gemms
    unscale()       -                 scaler.unscale_(optimizer)       grads -> fp32, times inv_scale, set found_inf
    clip()          clip_grad_norm_   clip_grad_norm_                  total norm in fp32, one factor for all
    step(lr)        optimizer         scaler.step(optimizer)           optimizer on the masters unless found_inf
    update()        zero_grad         scaler.update(), zero_grad       grow or back off, drop the gradients

The harness calls them in this order and nothing else inside the timed region. With ``task.accumulate`` a batch comes in
as many micro-batches: forward and backward are called once for each, the other phases once a step. An implementation
that is one piece (a CUDA graph, a compiled step, an engine of somebody else's) offers ``train_step(batches, lr)``
instead of the phases.

The harness owns the data, the schedule, the clock and the records; a backend owns its parameters and how it computes.
There is no base class: same constructor, same method names in the same order. What two backends do differently is the
comparison, and is written twice. What backends on a torch module answer alike is written once, in
``backends/torch_model.py``.

To add a backend: copy the file that is closest to ``mpcompare/backends/X.py``, add ``conf/backend/X.yaml`` with its
``_target_``, and a row to the table of backends in the README. Every other key of that file is an option: a keyword
argument of the backend's constructor. One in a package of its own needs a class and an entry point:
see ``mpcompare/testing``.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypedDict, cast

from torch import Tensor, nn

from mpcompare.errors import BackendUnavailable as BackendUnavailable
from mpcompare.loss_scale import LossScale
from mpcompare.phases import PHASES as PHASES
from mpcompare.phases import WHOLE_STEP
from mpcompare.tasks.rates import Rates
from mpcompare.tasks.task import Params, Task

MemoryModel = dict[str, dict[str, int]]
ModuleDtypes = dict[str, dict[str, str]]
Batches = Sequence[tuple[Tensor, Tensor]]  # the micro-batches of one step, inputs and targets


class State(TypedDict):
    """Everything that the next step depends on, in the form that all backends share: what one saved, another can load.

    Attributes:
        params: the fp32 parameters that the optimizer updates, under the names of ``model.named_parameters()``.
        buffers: the network's, under the names of ``model.named_buffers()``.
        optimizer: what it remembers of each parameter, under torch's names: ``{"exp_avg": {"layer1.weight": ...}}``
            (``momentum_buffer`` of SGD; ``exp_avg``, ``exp_avg_sq`` and ``step``, a 0-d fp32 tensor, of Adam); empty
            before the first update.
        loss_scale: ``scale``, ``growth_tracker`` and ``overflows_left``, as far as the policy has them.
    """

    params: Params
    buffers: Params
    optimizer: dict[str, Params]
    loss_scale: dict[str, float]


class Backend(Protocol):
    """One implementation of the task, with either the phases (:class:`Phased`) or the step (:class:`WholeStep`).

    Attributes:
        PRECISIONS: accepted values of ``precision``; the first is the default where it does not depend on the device.
        engine: what computes the matrix products: ``torch``, or ``native`` for this project's own operators.
        skipped: whether the last step left the parameters alone because its gradients held inf or NaN: a bool,
            or a 0-d tensor on the device that is not 0 then (reading it may wait).
        grad_norm: norm of the last step's unscaled gradients, all of them together, before it was clipped: a number, or
            a 0-d tensor on the device; None where nothing is clipped.

    Two more may be left out. ``warmup_steps``, an int: the number of first steps that are not as all later ones, such
    as those before a graph is captured. ``workspaces()``: bytes that its products hold beside tensors, by name.
    """

    PRECISIONS: ClassVar[tuple[str, ...]]
    engine: str
    skipped: bool | Tensor
    grad_norm: float | Tensor | None

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale, **options: Any) -> None:
        """Builds everything that outlives a step, on the device of ``model``.

        Args:
            model: the network with its initial fp32 weights, in training mode; shared with other backends, so copied
                here, never written.
            task: loss, optimizer, batch size, accumulation, clipping.
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
        """The unscaled fp32 gradients of the step, named as the parameters; valid from ``unscale()`` to ``update()``,
        and after ``train_step()`` until the next one. From ``clip()`` on they are the clipped ones. Empty where they
        cannot be seen."""

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

    def state_dict(self) -> State:
        """Everything that the next step depends on. Its tensors may be the backend's own, which the next step
        changes."""

    def load_state_dict(self, state: State) -> None:
        """Continues from a :class:`State`, bit for bit, and keeps no tensor of it. One from a backend without loss
        scaling says nothing of the scale: then it stays as it is."""

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
        """Mean loss of a micro-batch, an fp32 scalar on the device, unscaled."""

    def backward(self) -> None:
        """Gradients of the scaled loss over ``task.accumulate``; those of further micro-batches are added, in fp32."""

    def unscale(self) -> None:
        """Divides the gradients by the loss scale, in fp32, and looks for inf and NaN."""

    def clip(self) -> None:
        """Where the task clips: multiplies all gradients by ``min(1, clip_norm / (norm + 1e-6))``, and sets
        ``grad_norm``."""

    def step(self, lr: float | Tensor) -> None:
        """Updates the fp32 master parameters, or skips; sets ``skipped``.

        Args:
            lr: learning rate of this step: a number, or a 0-d tensor on the device where the schedule depends on steps
                that only the device knows to be skipped.
        """

    def update(self) -> None:
        """Sets the loss scale of the next step and drops the gradients."""


class WholeStep(Protocol):
    """A backend whose step is one piece."""

    def train_step(self, batches: Batches, lr: float | Tensor) -> Tensor:
        """A whole step; returns the mean loss of its micro-batches, an fp32 scalar on the device, unscaled."""


def in_one_piece(backend: Any) -> bool:
    """Whether the backend's step has no phases: it offers ``train_step``."""
    return callable(getattr(backend, "train_step", None))


class Walk:
    """One training step of a backend, phase by phase. To iterate is to take the step:

        for phase in Walk(backend, batches, lr):
            clock.mark()

    yields the name of each phase when it is done: ``forward`` and ``backward`` once a micro-batch, the others once. A
    backend that offers ``train_step`` yields ``WHOLE_STEP``, once.

    Attributes:
        in_one_piece: as the function of this name says.
        loss: the mean of the losses of the micro-batches so far, an fp32 scalar on the device.
    """

    def __init__(
        self, backend: Any, batches: Batches, lr: float | Tensor, at_the_end: Callable[[], None] = lambda: None
    ) -> None:
        """``at_the_end`` is called once, after the last phase."""
        self.backend, self.batches, self.lr = backend, batches, lr
        self.in_one_piece = in_one_piece(backend)
        self.loss: Any = 0.0
        self._phases = self._in_one_piece(at_the_end) if self.in_one_piece else self._by_phases(at_the_end)

    def __iter__(self) -> Iterator[str]:
        return self._phases

    def through(self, phase: str) -> None:
        """Goes on until ``phase`` is done; in one piece, to the end."""
        for done in self._phases:
            if done == phase:
                return

    def finish(self) -> Tensor:
        """Goes on to the end, and returns the loss."""
        for _ in self._phases:
            pass
        return cast(Tensor, self.loss)

    def _in_one_piece(self, at_the_end: Callable[[], None]) -> Iterator[str]:
        self.loss = self.backend.train_step(self.batches, self.lr)
        yield WHOLE_STEP
        at_the_end()

    def _by_phases(self, at_the_end: Callable[[], None]) -> Iterator[str]:
        backend, count = self.backend, len(self.batches)
        for x, y in self.batches:
            # A sum is a new tensor: a backend may overwrite its own.
            self.loss = backend.forward(x, y) if count == 1 else self.loss + backend.forward(x, y) / count
            yield "forward"
            backend.backward()
            yield "backward"
        backend.unscale()
        yield "unscale"
        backend.clip()
        yield "clip"
        backend.step(self.lr)
        yield "step"
        backend.update()
        yield "update"
        at_the_end()


def take_step(backend: Any, batches: Batches, lr: float | Tensor) -> Tensor:
    """Takes one training step and returns its loss."""
    return Walk(backend, batches, lr).finish()


class Stepper:
    """A backend that takes one step after the other, each at the learning rate that the schedule gives it.

    Attributes:
        rates: the learning rates of its steps; they count the steps that were taken.
    """

    def __init__(self, backend: Any, rates: Rates) -> None:
        self.backend, self.rates = backend, rates

    def walk(self, batches: Batches) -> Walk:
        """The next step, phase by phase; the rates count it when it is done."""
        return Walk(self.backend, batches, self.rates.now, lambda: self.rates.count(self.backend.skipped))

    def step(self, batches: Batches) -> Tensor:
        """Takes the next step and returns its loss."""
        return self.walk(batches).finish()


def show_gradients(backend: Any, batches: Batches, lr: float | Tensor) -> tuple[Tensor, Params]:
    """Takes a step up to where its gradients can be seen, which in one piece is all of it.

    Returns the loss and the gradients, which the rest of the step may overwrite.
    """
    walk = Walk(backend, batches, lr)
    walk.through("unscale")
    return walk.loss, backend.grads()


def warmup_steps(backend: Any) -> int:
    """The number of first steps that are not as all later ones: those before a graph is captured, say."""
    return getattr(backend, "warmup_steps", 0)


def workspaces(backend: Any) -> dict[str, int]:
    """Bytes that the backend's own products hold beside tensors, by name; empty where it does not say."""
    return backend.workspaces() if hasattr(backend, "workspaces") else {}


def idle_phases(backend: Any, task: Task) -> tuple[str, ...]:
    """The phases that hold no work: a backend's own, and ``clip`` where the task clips nothing."""
    return (*backend.IDLE_PHASES, *(() if task.clip_norm else ("clip",)))


def options_of(make_backend: type[Backend]) -> list[str]:
    """The names of a backend's own options: what its constructor takes beyond what all backends take."""
    common = inspect.signature(Backend.__init__).parameters
    return [name for name in inspect.signature(make_backend).parameters if name not in common]
