"""The libraries of other people: imported when a row of theirs is chosen, and named with their extra where missing."""

import importlib
from types import ModuleType

import torch
from torch import Tensor, nn

from mpcompare.errors import BackendUnavailable


def library(module: str, backend: str) -> ModuleType:
    """Imports ``module``, which ``backend`` is made of; the extra that installs it has the backend's name.

    Raises:
        BackendUnavailable: it is not installed, or cannot be imported here.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendUnavailable(
            f"backend={backend} needs the package of {error.name or module}: pip install 'mpcompare[{backend}]'"
        ) from error


def join_alone(device: torch.device) -> None:
    """Makes a process group of this process alone, which needs no network, unless there is one already.

    Raises:
        BackendUnavailable: torch was built without ``torch.distributed``.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise BackendUnavailable("needs a torch that was built with torch.distributed")
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def observe_output(model: nn.Module, observed: dict[str, torch.dtype]) -> None:
    """Writes the dtype of the network's output, as its last layer returns it, to ``observed["activations"]``: a library
    may cast what the network returns."""

    def returned(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            observed["activations"] = output.dtype

    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(returned)
