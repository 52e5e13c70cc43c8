"""READ FIRST. The contract: a training step is six phases, and a backend is a class with a method for each.

    phase           fp32              amp                              scratch
    forward(x, y)   plain module      autocast                         cast masters -> params, gemms, loss in fp32
    backward()      loss.backward()   scaler.scale(loss).backward()    dlogits *= loss scale, then gemms
    unscale()       -                 scaler.unscale_(optimizer)       grads -> fp32, times inv_scale, set found_inf
    clip()          clip_grad_norm_   clip_grad_norm_                  total norm in fp32, one factor for all
    step(lr)        optimizer         scaler.step(optimizer)           optimizer on the masters unless found_inf
    update()        zero_grad         scaler.update(), zero_grad       grow or back off, drop the gradients

The harness calls them in this order and nothing else inside the timed region. With ``task.accumulate`` a batch comes in
as many micro-batches: forward and backward are called once for each, the other phases once a step. A step that is one
piece (a CUDA graph, a compiled step, somebody else's engine) is offered as ``train_step(batches, lr)`` instead.

A phase may return before its work is done only where the clock waits for it, which is on a CUDA device. A library that
computes in the background anywhere else must have finished when the phase returns (jax: ``block_until_ready``).

The harness owns the data, the schedule, the clock and the records; a backend owns its parameters and how it computes.
It writes neither into a batch nor into the network that it is made from, which others get after it.
Inputs, targets and outputs are tensors, or trees of them (:mod:`mpcompare.tasks.batch`), which are cast and handed on
as tensors are: a backend need not know which.

A step is finished when its last call returns: on a CPU all weights are written by then; on a GPU all work is queued on
the current stream, or the current stream waits for it. A timed block ends when its last loss and ``master_params()``
have been read: work that goes on until then is timed, and weights that change after it make the verdict ``differs``.
There is no base class: the constructor is the same, and so are the names and the order of the methods. The differences
between backends are what is compared, so each backend spells out its own way. The answers that all backends on a torch
module share are written once, in ``backends/torch_model.py``, whose ``skipped_by`` says whether a
``GradScaler`` skipped, with a fused optimizer, too. A difference from ``amp`` that is meant is declared (``promises``).

Before a step the harness sets torch's generators (``tasks/draws.py``). A backend that calls the network with the rows
of a micro-batch as they are, and draws nothing from these generators before, has the masks of dropout of all others.

To add a backend: copy the file that is closest to ``mpcompare/backends/X.py``, add ``conf/backend/X.yaml`` with its
``_target_``, and a row to the table in ``docs/backends.md``. Every other key of that YAML is an option: a keyword
argument of the backend's constructor. A backend in a package of its own needs a class and an entry point:
see ``mpcompare/testing``.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NotRequired, Protocol, TypedDict, cast

from torch import Tensor, nn

from mpcompare.errors import BackendUnavailable as BackendUnavailable
from mpcompare.errors import InputError
from mpcompare.loss_scale import LossScale
from mpcompare.operands import Products
from mpcompare.phases import PHASES as PHASES
from mpcompare.phases import WHOLE_STEP
from mpcompare.promises import NOTHING, Promises
from mpcompare.tasks.losses import shares
from mpcompare.tasks.schedules import Rates
from mpcompare.tasks.task import Params, Task
from mpcompare.typed import check_type

MemoryModel = dict[str, dict[str, int]]
ModuleDtypes = dict[str, dict[str, str]]
Batches = Sequence[tuple[Any, Any]]  # the micro-batches of one step, inputs and targets: tensors, or trees of them


class State(TypedDict):
    """Everything that the next step depends on, in a form that all backends share: one loads what another has saved.

    Attributes:
        params: the fp32 parameters that the optimizer updates, under the names of ``model.named_parameters()``.
        buffers: the network's buffers, under the names of ``model.named_buffers()``.
        optimizer: its tensors for each parameter, under torch's names: ``{"exp_avg": {"layer1.weight": ...}}``
            (``momentum_buffer`` for SGD; ``exp_avg``, ``exp_avg_sq`` and ``step``, a 0-d fp32 tensor, for Adam); empty
            before the first update.
        loss_scale: ``scale``, ``growth_tracker`` and ``overflows_left``, where the loss scale has them.
        generators: states of the backend's own random generators, uint8 ``[bytes]`` (``torch.Generator.get_state``), by
            names of its choice; few backends have any. A state from another backend has none, and this backend's then
            stay as they are. torch's own generators are the harness's, which saves them.
    """

    params: Params
    buffers: Params
    optimizer: dict[str, Params]
    loss_scale: dict[str, float]
    generators: NotRequired[dict[str, Tensor]]


class Backend(Protocol):
    """One implementation of the task, with either the phases (:class:`Phased`) or the step (:class:`WholeStep`).

    Attributes:
        PRECISIONS: accepted values of ``precision``; the first is the default where it does not depend on the device.
        engine: the library that computes the matrix products, for the record: ``torch``, or ``native`` for this
            project's own operators.
        skipped: whether the last step left the parameters alone because its gradients held inf or NaN: a bool,
            or a 0-d tensor on the device that is not 0 then (reading it may wait).
        grad_norm: norm of the last step's unscaled gradients, all of them together, before it was clipped: a number, or
            a 0-d tensor on the device; None where nothing is clipped.

    A backend may leave out five more members; :func:`warmup_steps`, :func:`workspaces`, :func:`promises_of`,
    :func:`called_module` and :func:`watched_products` ask for them.

        warmup_steps: an int, how many first steps of a new backend run in another way than all later ones, such as
            steps before a graph is captured. No step is timed before they and one more are over. 0 where left out.
        workspaces(): ``{name: bytes}``, the memory apart from tensors in which its matrix products compute, as measured
            so far and without zeros. On a GPU it is part of the allocator's peak, on a CPU it lies outside of the peak.
            Empty where left out.
        promises: a :class:`mpcompare.promises.Promises`, the differences from ``amp`` that the backend declares for its
            precision and task. The verdict compares it with them, and with ``amp`` in all else. None where left out.
        called_module: the torch module that a step calls, with the names of ``model``. Hooks on its layers let the
            verdict see the inputs and outputs of each layer. None where left out. A compiled or captured step leaves it
            out, because its layers call no hooks.
        watched_products(): for a step that calls no module: a context manager. It yields a
            :class:`mpcompare.operands.Products`, which notes the products of all steps within the context. None where
            left out.
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
            loss_scale: a fresh loss scale, owned by this backend from now on.
            options: this backend's own, by name and with defaults; most backends have none.

        Raises:
            InputError: this backend cannot do this combination.
            BackendUnavailable: something optional is missing, or this kind of network cannot be trained.
        """

    def master_params(self) -> Params:
        """Returns the fp32 parameters that the optimizer updates, under the names of ``model.named_parameters()``."""

    def buffers(self) -> Params:
        """Returns the network's buffers after the last step (running statistics), under the names of
        ``model.named_buffers()``."""

    def grads(self) -> Params:
        """Returns the unscaled fp32 gradients of the step, named as the parameters. They are valid from ``unscale()``
        to ``update()``, and after ``train_step()`` until the next one; from ``clip()`` on they are the clipped ones.
        A parameter that no micro-batch's loss depends on has none, and the step leaves it as it is. Empty where they
        cannot be seen."""

    def loss_scale(self) -> float | Tensor:
        """Returns the scale of the next step: a number, or a 0-d tensor on the device (reading it may wait)."""

    def dtypes(self) -> dict[str, str]:
        """Returns the dtypes of params, activations, gradients, loss and optimizer, as observed in the last step and
        not as requested."""

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        """Takes a step with a batch, and returns the dtypes that are seen in each layer. Called on a backend that is
        used for nothing else.

        Returns:
            ``{layer: row}`` in the order in which the layers are called, each under its name in the module, and a row
            ``(loss)``; empty where the step cannot be looked into. In a row, ``kind`` is the module's class. All other
            cells are dtypes, ``+`` between several, ``-`` where there is none. ``master`` is the dtype of the weight
            that the optimizer updates, ``weight`` of the layer's own weight, ``input`` and ``output`` of the layer's
            tensors. ``computes`` and ``backward`` are the dtypes of its arithmetic in forward and in backward.
            ``gradient`` is the dtype of the loss's gradient with respect to ``output``.
        """

    def state_dict(self) -> State:
        """Returns everything that the next step depends on. The tensors may be the backend's own, which the next step
        changes."""

    def load_state_dict(self, state: State) -> None:
        """Continues from a :class:`State`, bit for bit, and keeps no tensor of it: the harness loads many backends from
        one state, and another backend may own its tensors and go on. A state from a backend without loss scaling has
        no scale; this backend's scale then stays as it is, and so does a fixed scale."""

    def memory_model(self) -> MemoryModel:
        """Returns the bytes of every tensor that is live at a step's peak, ``{kind: {tensor: bytes}}``. The kinds are
        in ``mpcompare.cost.TENSOR_KINDS``. Empty if unknown."""


class Phased(Protocol):
    """A backend that lets itself be looked into.

    Attributes:
        IDLE_PHASES: the phases that hold no work here, because none is needed or another phase does it.
        task: the task that it was made with, under this name: its loss is asked for the shares of micro-batches.

    Where the task's loss counts its labels (:mod:`mpcompare.tasks.losses`) and ``task.accumulate`` is above 1, the
    attribute ``share`` is set before each ``forward``: the micro-batch's share of the step's labels, a 0-d fp32 tensor
    on the device. ``backward`` multiplies the loss by it, in the place of dividing it by ``task.accumulate``. A backend
    whose step is one piece asks ``shares`` itself.
    """

    IDLE_PHASES: tuple[str, ...]
    task: Task

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the mean loss of a micro-batch, an fp32 scalar on the device, unscaled."""

    def backward(self) -> None:
        """Computes the gradients of the scaled loss over ``task.accumulate`` (or times ``share``), and adds them, in
        fp32, to the gradients of the step's earlier micro-batches."""

    def unscale(self) -> None:
        """Divides the gradients by the loss scale, in fp32, and looks for inf and NaN."""

    def clip(self) -> None:
        """Multiplies all gradients by ``min(1, clip_norm / (norm + 1e-6))`` and sets ``grad_norm``; does nothing where
        the task does not clip."""

    def step(self, lr: float | Tensor) -> None:
        """Updates the fp32 master parameters, or skips; sets ``skipped``.

        Args:
            lr: learning rate of this step: a number, or a 0-d tensor on the device where the schedule depends on steps
                that only the device knows to be skipped. Of a parameter group it is ``lr_factor`` times that
                (:mod:`mpcompare.tasks.groups`), which ``torch_model.set_lr`` knows.
        """

    def update(self) -> None:
        """Sets the loss scale of the next step and drops the gradients."""


class WholeStep(Protocol):
    """A backend whose step is one piece."""

    def train_step(self, batches: Batches, lr: float | Tensor) -> Tensor:
        """Takes a whole step and returns the mean loss of its micro-batches, an fp32 scalar on the device, unscaled.

        ``grads()`` shows the gradients of this step until the next one. A step that drops or overwrites its gradients
        at its end keeps copies of them for that; without them the verdict is ``within noise`` at best."""


_Phases = Iterator[tuple[str, Any]]  # each phase when it is done, and the mean of the losses so far


def in_one_piece(backend: Any) -> bool:
    """Whether the backend's step has no phases: it offers ``train_step``."""
    return callable(getattr(backend, "train_step", None))


class Walk:
    """One training step of a backend, phase by phase. Iterating takes the step:

        for phase in Walk(backend, batches, lr):
            clock.mark()

    The iterator yields the name of each phase when it is done: ``forward`` and ``backward`` once a micro-batch, the
    others once. For a backend that offers ``train_step`` it yields ``WHOLE_STEP``, once. ``loss`` is the mean of the
    losses of the micro-batches so far, an fp32 scalar on the device.
    """

    def __init__(
        self, backend: Any, batches: Batches, lr: float | Tensor, at_the_end: Callable[[], None] = lambda: None
    ) -> None:
        """``at_the_end`` is called once, after the last phase."""
        self.backend, self.in_one_piece = backend, in_one_piece(backend)
        self.loss: Any = 0.0
        take = _whole if self.in_one_piece else _by_phases
        # It knows nothing of this walk. A circle of the two would keep the backend where a walk is left before its end.
        self._phases = take(backend, batches, lr, at_the_end)

    def __iter__(self) -> Iterator[str]:
        phases = self._phases
        for phase, self.loss in phases:
            yield phase

    def through(self, phase: str) -> None:
        """Goes on until ``phase`` is done; to the end where the step is in one piece."""
        for done in self:
            if done == phase:
                return

    def finish(self) -> Tensor:
        """Goes on to the end, and returns the loss."""
        for _ in self:
            pass
        return cast(Tensor, self.loss)


def _whole(backend: Any, batches: Batches, lr: float | Tensor, at_the_end: Callable[[], None]) -> _Phases:
    yield WHOLE_STEP, backend.train_step(batches, lr)
    at_the_end()


def _by_phases(backend: Any, batches: Batches, lr: float | Tensor, at_the_end: Callable[[], None]) -> _Phases:
    loss: Any = 0.0
    # To count labels is part of a step, as it is in everybody's training.
    parts = shares(backend.task.loss_fn, [y for _, y in batches]) if len(batches) > 1 else None
    for number, (x, y) in enumerate(batches):
        if parts:
            backend.share = parts[number]
        # The sum is a new tensor, because a backend may overwrite its own loss in the next forward.
        if len(batches) == 1:
            loss = backend.forward(x, y)
        elif parts:
            loss = loss + backend.forward(x, y) * parts[number]
        else:
            loss = loss + backend.forward(x, y) / len(batches)
        yield "forward", loss
        backend.backward()
        yield "backward", loss
    backend.unscale()
    yield "unscale", loss
    backend.clip()
    yield "clip", loss
    backend.step(lr)
    yield "step", loss
    backend.update()
    yield "update", loss
    at_the_end()


def take_step(backend: Any, batches: Batches, lr: float | Tensor) -> Tensor:
    """Takes one training step and returns its loss."""
    return Walk(backend, batches, lr).finish()


class Stepper:
    """A backend that takes one step after the other, each at the learning rate that the schedule gives it: ``rates``
    counts the steps that were taken."""

    def __init__(self, backend: Any, rates: Rates) -> None:
        self.backend, self.rates = backend, rates

    def walk(self, batches: Batches) -> Walk:
        """Returns the next step, to be taken phase by phase; the rates count it when it is done."""
        return Walk(self.backend, batches, self.rates.now, lambda: self.rates.count(self.backend.skipped))

    def step(self, batches: Batches) -> Tensor:
        """Takes the next step and returns its loss."""
        return self.walk(batches).finish()


def show_gradients(backend: Any, batches: Batches, lr: float | Tensor) -> tuple[Tensor, Params]:
    """Takes a step up to the point where its gradients can be seen, which is the end of a step in one piece. Returns
    the loss and the gradients, which the rest of this step and later ones may overwrite."""
    walk = Walk(backend, batches, lr)
    walk.through("unscale")
    return walk.loss, backend.grads()


def warmup_steps(backend: Any) -> int:
    """Returns how many first steps of a new backend run in another way than all later ones; 0 where it does not say."""
    return _answer("warmup_steps", getattr(backend, "warmup_steps", 0), int)


def workspaces(backend: Any) -> dict[str, int]:
    """Returns the bytes apart from tensors in which a backend's products compute, by name; empty where not said."""
    return _answer("workspaces()", backend.workspaces(), dict[str, int]) if hasattr(backend, "workspaces") else {}


def promises_of(backend: Any) -> Promises:
    """Returns the differences from ``amp`` that a backend declares; none where it does not say."""
    if not isinstance(promises := getattr(backend, "promises", NOTHING), Promises):
        raise InputError("promises", promises, "expected a mpcompare.promises.Promises from the backend")
    return promises


def memory_model_of(backend: Any) -> MemoryModel:
    """Returns a backend's memory model. Raises InputError if its answer is no memory model."""
    return _answer("memory_model()", backend.memory_model(), MemoryModel)


def _answer(name: str, value: Any, expected: Any) -> Any:
    """Returns a backend's answer ``value``. Raises InputError if it is not of the type ``expected``."""
    check_type(f"the backend's {name}", value, expected)
    return value


def called_module(backend: Any) -> nn.Module | None:
    """Returns the torch module that a step of a backend calls, whose layers call hooks; None where it does not say."""
    return getattr(backend, "called_module", None)


def watched_products(backend: Any) -> AbstractContextManager[Products] | None:
    """Returns what notes the products of a backend's steps while it is entered; None where the backend shows none."""
    watch = getattr(backend, "watched_products", None)
    return None if watch is None else watch()


def idle_phases(backend: Any, task: Task) -> tuple[str, ...]:
    """Returns the phases that hold no work: phases that the backend names, and ``clip`` if the task clips nothing."""
    return (*backend.IDLE_PHASES, *(() if task.clip_norm else ("clip",)))


def options_of(make_backend: type[Backend]) -> list[str]:
    """Returns the names of a backend's options: arguments of its constructor that not all backends take."""
    common = inspect.signature(Backend.__init__).parameters
    return [name for name in inspect.signature(make_backend).parameters if name not in common]
