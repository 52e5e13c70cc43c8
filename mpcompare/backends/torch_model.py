"""What backends that train a torch module with torch's optimizers answer alike, outside the timed region."""

from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.watch.modules import watch
from mpcompare.contract import BackendUnavailable, ModuleDtypes, take_step
from mpcompare.precision import dtype_name
from mpcompare.tasks.task import Params, buffers_of, params_of


class TorchModel:
    """The answers of a backend that holds its fp32 parameters in ``model``.

    Attributes:
        model: the network, a copy of the backend's own.
        optimizer: of its parameters.
        observed: dtypes of the last step by what they are of: activations (the output), loss, gradients.
    """

    engine = "torch"
    model: nn.Module
    optimizer: torch.optim.Optimizer
    observed: dict[str, torch.dtype]

    def master_params(self) -> Params:
        return params_of(self.model)

    def buffers(self) -> Params:
        return buffers_of(self.model)

    def grads(self) -> Params:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def dtypes(self) -> dict[str, str]:
        return observed_dtypes(self.model, self.optimizer, self.observed)

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        return watch(self.model, self.master_params(), lambda: take_step(self, x, y))

    def state_dict(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**state, "scaler": self.scaler.state_dict()} if hasattr(self, "scaler") else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if hasattr(self, "scaler"):
            self.scaler.load_state_dict(state["scaler"])


def gradient_dtype(model: nn.Module) -> torch.dtype:
    """Of the first parameter that has a gradient."""
    return next(p.grad.dtype for p in model.parameters() if p.grad is not None)


def observed_dtypes(
    model: nn.Module, optimizer: torch.optim.Optimizer, observed: dict[str, torch.dtype]
) -> dict[str, str]:
    """``observed``, and the dtypes of the parameters and of the optimizer's state. Plain SGD has no state: it computes
    in the parameters' dtype."""
    weight = next(p for p in model.parameters() if p.requires_grad)
    updated = next(iter(optimizer.param_groups[0]["params"]))
    state = [value for value in optimizer.state[updated].values() if isinstance(value, Tensor) and value.dim()]
    found = {"params": weight.dtype, **observed, "optimizer": (state or [updated])[0].dtype}
    return {name: dtype_name(dtype) for name, dtype in found.items()}


def require_kernels(model: nn.Module, device_type: str, precision: str, backend: str) -> None:
    """Raises BackendUnavailable where torch has no kernel: its recurrent layers have no fp16 on a CPU (torch 2.15:
    "could not create a primitive descriptor for the LSTM forward propagation primitive")."""
    if device_type == "cpu" and precision == "fp16":
        for name, module in model.named_modules():
            if isinstance(module, nn.RNNBase):
                raise BackendUnavailable(
                    f"backend={backend} precision=fp16: torch's CPU {type(module).__name__} has no fp16 "
                    f"(layer {name or 'itself'}); bf16 and fp32 work"
                )
