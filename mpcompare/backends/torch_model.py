"""What backends that train a torch module with torch's optimizers answer alike, outside the timed region."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.layer_dtypes.modules import watch
from mpcompare.contract import BackendUnavailable, ModuleDtypes, State, take_step
from mpcompare.dtypes import dtype_name
from mpcompare.precision import FP16, PRECISIONS
from mpcompare.tasks.task import Params, Task, buffers_of, params_of


class TorchModel:
    """The answers of a backend that holds its fp32 parameters in ``model``.

    Attributes:
        task: what is trained.
        model: the network, a copy of the backend's own.
        optimizer: of its parameters.
        observed: dtypes of the last step by what they are of: activations (the output), loss, gradients.
    """

    engine = "torch"
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    observed: dict[str, torch.dtype]
    grad_norm: Tensor | None = None

    def master_params(self) -> Params:
        return params_of(self.model)

    def buffers(self) -> Params:
        return buffers_of(self.model)

    def grads(self) -> Params:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def dtypes(self) -> dict[str, str]:
        return observed_dtypes(self.model, self.optimizer, self.observed)

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        return watch(self.model, self.master_params(), lambda: take_step(self, [(x, y)], self.task.optimizer.lr))

    def state_dict(self) -> State:
        return {
            "params": self.master_params(),
            "buffers": self.buffers(),
            "optimizer": optimizer_state(self.optimizer, dict(self.model.named_parameters())),
            "loss_scale": scaler_state(self.scaler) if hasattr(self, "scaler") else {},
        }

    def load_state_dict(self, state: State) -> None:
        copy_into(self.master_params(), state["params"])
        copy_into(self.buffers(), state["buffers"])
        load_optimizer_state(self.optimizer, dict(self.model.named_parameters()), state["optimizer"])
        if hasattr(self, "scaler"):
            load_scaler_state(self.scaler, state["loss_scale"])


def share_of_step(task: Task, loss: Tensor) -> Tensor:
    """What a micro-batch adds to the step's loss, which is the mean over the whole batch."""
    return loss / task.accumulate if task.accumulate > 1 else loss


def clip_gradients(task: Task, model: nn.Module) -> Tensor | None:
    """``torch.nn.utils.clip_grad_norm_`` where the task clips. Returns the norm before.

    A norm of inf makes every gradient 0 or NaN, which is as well: GradScaler has seen the inf and skips the step.
    """
    if task.clip_norm is None:
        return None
    return nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm, task.clip_norm_type)


def set_lr(optimizer: torch.optim.Optimizer, lr: float | Tensor) -> None:
    """The rate of the next step, as torch's schedulers set it."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def copy_into(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])


def optimizer_state(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, Params]:
    """``State["optimizer"]``: what torch's optimizer remembers, by kind and name of parameter."""
    found: dict[str, Params] = {}
    for name, p in params.items():
        for kind, value in optimizer.state.get(p, {}).items():
            if value is not None:  # the momentum of a parameter that had no gradient yet
                found.setdefault(kind, {})[name] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return found


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], state: Mapping[str, Params]
) -> None:
    """The inverse of :func:`optimizer_state`."""
    numbers = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    mine: dict[int, dict[str, Any]] = {}
    for kind, values in state.items():
        for name, value in values.items():
            if params[name] in numbers:
                # Counts of updates lie on the CPU, unless torch takes them to the device itself.
                value = value.detach().clone() if kind != "step" else value.detach().cpu().clone()
                mine.setdefault(numbers[params[name]], {})[kind] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": mine})


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, float]:
    """``State["loss_scale"]`` of a GradScaler."""
    if not scaler.is_enabled():
        return {}
    state = scaler.state_dict()
    return {"scale": state["scale"], "growth_tracker": state["_growth_tracker"]}


def load_scaler_state(scaler: torch.amp.GradScaler, state: Mapping[str, float]) -> None:
    """The inverse of :func:`scaler_state`."""
    if scaler.is_enabled() and "scale" in state:
        tracker = int(state.get("growth_tracker", 0))
        scaler.load_state_dict({**scaler.state_dict(), "scale": state["scale"], "_growth_tracker": tracker})


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
    if device_type == "cpu" and PRECISIONS[precision].storage == FP16:
        for name, module in model.named_modules():
            if isinstance(module, nn.RNNBase):
                raise BackendUnavailable(
                    f"backend={backend} precision={precision}: torch's CPU {type(module).__name__} has no fp16 "
                    f"(layer {name or 'itself'}); bf16 and fp32 work"
                )
