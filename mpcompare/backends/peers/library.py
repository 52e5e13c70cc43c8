"""The libraries of other people: imported when a row of theirs is chosen, and named with their extra where missing.

Fabric and Accelerate set up a module and an optimizer, and are called alike from then on: :class:`SetUp`.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.amp import grad_scaler
from mpcompare.backends.torch_model import (
    TorchModel,
    clip_gradients,
    gradient_dtype,
    require_kernels,
    set_lr,
    share_of_step,
    skipped_by,
)
from mpcompare.errors import BackendUnavailable, InputError
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.task import Task


def library(module: str, backend: str) -> ModuleType:
    """Imports ``module`` for ``backend``. The extra that installs the module has the backend's name. Raises
    BackendUnavailable where the module is not installed, or cannot be imported here."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needs = f"needs the package of {error.name or module}: pip install 'mpcompare[{backend}]'"
        raise BackendUnavailable(f"backend={backend} {needs}") from error


def join_alone(device: torch.device) -> None:
    """Makes a process group of this process alone, which needs no network, unless there is one already. Raises
    BackendUnavailable where torch was built without ``torch.distributed``."""
    import torch.distributed as dist

    if not dist.is_available():
        raise BackendUnavailable("needs a torch that was built with torch.distributed")
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def transposed(name: str, tensor: Tensor) -> Tensor:
    """Returns a weight of torch as the kernel of Keras and Flax, or the other way round; a bias is the same in all."""
    return tensor.t() if name.endswith(".weight") else tensor


class SetUp(TorchModel):
    """A module and an optimizer that a library has set up, whose ``step`` is GradScaler's step and update in one. Its
    ``scaler`` is a disabled one where the library has none."""

    PRECISIONS = ("fp16", "bf16")
    IDLE_PHASES: tuple[str, ...] = ()
    library: Any  # the library's object, whose ``backward`` multiplies the loss
    network: nn.Module  # the module as the library returns it
    stepper: Any  # the optimizer as the library returns it
    skipped: bool | Tensor

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale, name: str) -> None:
        """``name`` is the library's name. The backend has the same name in small letters."""
        if type(loss_scale) is not (DynamicLossScale if precision == "fp16" else NoLossScale):
            raise InputError("loss_scale", loss_scale.name, f"{name} has none but auto in precision={precision}")
        self.task, self.device_type = task, next(model.parameters()).device.type
        require_kernels(model, self.device_type, precision, name.lower())
        self.scaler = grad_scaler(loss_scale, self.device_type)  # refuses what GradScaler does not have
        self.model = copy_of(model)
        self.optimizer = task.optimizer.make(self.model.named_parameters())
        self.skipped, self.observed = False, {}
        for module in self.model.modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(self._returned)

    def _returned(self, _: nn.Module, __: object, output: object) -> None:
        """Notes the dtype of the output as its last layer returns it: a library may cast what the network returns."""
        if isinstance(output, Tensor) and output.is_floating_point():
            self.observed["activations"] = output.dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.network(x)
        self.loss = self.task.loss_fn(output, y)
        self.observed["loss"] = self.loss.dtype
        return self.loss.detach()

    def backward(self) -> None:
        self.library.backward(share_of_step(self.task, self.loss, self.share))
        self.observed["gradients"] = gradient_dtype(self.model)

    def clip(self) -> None:
        self.grad_norm = clip_gradients(self.task, self.model.parameters())

    def step(self, lr: float | Tensor) -> None:
        set_lr(self.optimizer, lr)
        self.skipped = skipped_by(self.stepper.step, self.optimizer)

    def update(self) -> None:
        self.stepper.zero_grad()
