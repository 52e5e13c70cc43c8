"""READ FIRST. The contract: a training step is five phases, and a backend is one column of this table.

    phase           fp32              amp                              scratch
    forward(x, y)   plain MLP         autocast                         cast masters -> params, gemms, loss in fp32
    backward()      loss.backward()   scaler.scale(loss).backward()    dlogits *= loss scale, then gemms
    unscale()       -                 scaler.unscale_(optimizer)       grads -> fp32, times inv_scale, set found_inf
    step()          SGD               scaler.step(optimizer)           SGD on the masters unless found_inf
    update()        zero_grad         scaler.update(), zero_grad       grow or back off, drop the gradients

The harness calls the five in this order and nothing else inside the timed region. It owns the data, the clock and the
records; a backend owns its parameters and how it computes. There is no base class: same constructor, same method names
in the same order, and what two backends have in common is written twice, because that duplication is the comparison.

To add a backend: copy the file that is closest to ``mpcompare/backends/X.py``, add ``conf/backend/X.yaml`` with its
``_target_``, and a row to the table of backends in the README. Every other key of that file is an option: a keyword
argument of the backend's constructor and of its ``memory_model``.
"""

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mpcompare.errors import InputError, check_choice
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.mlp import Params, Task

PHASES = ("forward", "backward", "unscale", "step", "update")
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MemoryModel = dict[str, dict[str, int]]


class BackendUnavailable(Exception):  # noqa: N818 - it is a cell of the table, not a fault
    """Raised by a constructor when an optional package or a device feature is missing; the reason is one line."""


class Backend(Protocol):
    """One implementation of the task.

    Attributes:
        PRECISIONS: accepted values of ``precision``; the first is the default where it does not depend on the device.
        IDLE_PHASES: those of ``PHASES`` that hold no work here: none is needed, or another phase does it. Where options
            or the device decide, an instance has its own.
        engine: what computes the matrix products: ``torch``, or ``native`` for this project's own operators.
        skipped: whether the last ``step()`` left the parameters alone because ``unscale()`` found inf or NaN: a bool,
            or a 0-d tensor on the device that is not 0 then (reading it may wait).
    """

    PRECISIONS: ClassVar[tuple[str, ...]]
    IDLE_PHASES: tuple[str, ...]
    engine: str
    skipped: bool | Tensor

    def __init__(
        self, params: Params, task: Task, precision: str, loss_scale: LossScale, engine: str, **options: Any
    ) -> None:
        """Builds everything that outlives a step, on the device of ``params``.

        Args:
            params: initial fp32 weights on the device; shared with other backends, so copied here, never written.
            task: shape, loss and optimizer.
            precision: one of ``PRECISIONS``, resolved (never ``auto``).
            loss_scale: a fresh policy, owned by this backend from now on.
            engine: ``native``, ``torch`` or ``auto``; backends without native operators ignore it.
            options: this backend's own, by name and with defaults; most have none.

        Raises:
            InputError: a combination that this backend cannot do.
            BackendUnavailable: something optional is missing.
        """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss of the batch, an fp32 scalar on the device, unscaled. ``x`` is fp32 ``[n, in]``; see ``mlp.loss_fn``."""

    def backward(self) -> None:
        """Gradients of the scaled loss."""

    def unscale(self) -> None:
        """Divides the gradients by the loss scale, in fp32, and looks for inf and NaN."""

    def step(self) -> None:
        """Updates the fp32 master parameters, or skips; sets ``skipped``."""

    def update(self) -> None:
        """Sets the loss scale of the next step and drops the gradients."""

    # What a backend answers, outside the timed region.

    def master_params(self) -> Params:
        """The fp32 parameters that the optimizer updates."""

    def grads(self) -> Params:
        """The unscaled fp32 gradients; valid from ``unscale()`` to ``update()``, and where ``forward()`` does the whole
        step, until the next one."""

    def loss_scale(self) -> float | Tensor:
        """The scale that the next step will use: a number, or a 0-d tensor on the device (reading it may wait)."""

    def dtypes(self) -> dict[str, str]:
        """Observed in the last step, not requested: dtypes of params, activations, gradients, loss, optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on: master parameters, optimizer state, loss scale state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`, bit for bit."""

    @staticmethod
    def memory_model(task: Task, precision: str, engine: str, **options: Any) -> MemoryModel:
        """Bytes of every tensor that is live at a step's peak: ``{kind: {tensor: bytes}}``, the kinds those of
        ``mpcompare.cost.memory.KINDS``; empty if unknown."""


def step(backend: Backend, x: Tensor, y: Tensor) -> Tensor:
    """One training step: the five phases in their order. Returns the loss."""
    loss = backend.forward(x, y)
    backend.backward()
    backend.unscale()
    backend.step()
    backend.update()
    return loss


def resolve_precision(precision: str, accepted: tuple[str, ...], device: torch.device, backend: str) -> str:
    """``auto`` becomes fp16 on CUDA and bf16 on a CPU, where torch's fp16 GEMM is 100 times slower, if accepted.

    Raises:
        InputError: an unknown precision, one that this backend does not do, or TF32 without a CUDA device.
    """
    check_choice("precision", precision, ("auto", *DTYPES))
    if precision == "auto":
        preferred = "fp16" if device.type == "cuda" else "bf16"
        return preferred if preferred in accepted else accepted[0]
    if precision not in accepted:
        raise InputError("precision", precision, f"backend={backend} accepts one of auto, {', '.join(accepted)}")
    if precision == "tf32" and device.type != "cuda":
        raise InputError("precision", precision, f"needs a CUDA device, this run is on {device.type}")
    return precision


def dtype_name(dtype: torch.dtype) -> str:
    """``fp32``, ``fp16``, ``bf16``; any other dtype under torch's own name."""
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
