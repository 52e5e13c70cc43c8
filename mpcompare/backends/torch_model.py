"""The answers that backends on a torch module and torch's optimizers share, all outside of the timed region."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from mpcompare.backends.layer_dtypes.modules import layer_dtypes_of_step
from mpcompare.backends.memory_models.mlp import PeakOf
from mpcompare.contract import BackendUnavailable, MemoryModel, ModuleDtypes, State
from mpcompare.dtypes import dtype_name, torch_dtype
from mpcompare.precision import BF16, FP16, PRECISIONS, Format
from mpcompare.tasks.groups import params_in
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.tasks.task import Params, Task, buffers_of, params_of, put_buffers


class TorchModel:
    """The answers of a backend that holds its fp32 parameters in ``model``."""

    engine = "torch"
    peak_of: ClassVar[PeakOf | None] = None  # the memory model of its step on an MLP; None: it has none
    task: Task  # loss, optimizer, batch size, accumulation, clipping
    model: nn.Module  # the network, a copy that belongs to the backend
    optimizer: torch.optim.Optimizer  # updates the parameters of ``model``
    loss: Tensor  # the loss of the last micro-batch, with its graph
    # the dtypes of ``activations`` (the output), ``loss`` and ``gradients`` in the last step
    observed: dict[str, torch.dtype]
    precision: str  # the precision of an MLP's memory model
    scaler: torch.amp.GradScaler  # in a backend whose ``GradScaler`` scales the loss
    device_type: str  # in such a backend, too
    static_scale: float | None = None  # the scale of a policy that keeps it
    grad_norm: Tensor | None = None
    share: Tensor | None = None

    @property
    def called_module(self) -> nn.Module | None:
        return self.model

    def master_params(self) -> Params:
        return {name: p.float() for name, p in self.own_params().items()}  # no copy of fp32; frozen may be 16-bit

    def own_params(self) -> Params:
        """Returns the parameters as the module has them, for others to write into."""
        return params_of(self.model)

    def updated_params(self) -> Mapping[str, nn.Parameter]:
        """Returns the parameters that the optimizer updates, under the module's names: the module's own parameters,
        unless there are masters."""
        return dict(self.model.named_parameters())

    def observe(self, output: Tensor, loss: Tensor) -> Tensor:
        """Keeps a micro-batch's loss for ``backward()``, and notes the dtypes. Returns the loss as ``forward()`` does,
        without its graph."""
        self.loss, self.observed = loss, {"activations": output.dtype, "loss": loss.dtype}
        return loss.detach()

    def as_shown(self, tensors: Params) -> Params:
        """Returns buffers, gradients or moments as the harness is shown them: as they are, in most backends."""
        return tensors

    def buffers(self) -> Params:
        return self.as_shown(buffers_of(self.model))

    def grads(self) -> Params:
        return self.as_shown({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})

    def loss_scale(self) -> float | Tensor:
        return self.scaler.scale(torch.ones((), device=self.device_type))  # 1 * scale; get_scale() would wait

    def dtypes(self) -> dict[str, str]:
        weight = next(p for p in self.updated_params().values() if p.requires_grad)
        updated = next(p for p in params_in(self.optimizer) if p.requires_grad)
        state = [value for value in self.optimizer.state[updated].values() if isinstance(value, Tensor) and value.dim()]
        # Plain SGD has no state: it computes in the parameters' dtype.
        dtypes = {"params": weight.dtype, **self.observed, "optimizer": (state or [updated])[0].dtype}
        return {name: dtype_name(dtype) for name, dtype in dtypes.items()}

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        return layer_dtypes_of_step(self, self.model, self.updated_params(), [(x, y)])

    def state_dict(self) -> State:
        loss_scale = {}
        if hasattr(self, "scaler") and self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            loss_scale = {"scale": scaler["scale"], "growth_tracker": scaler["_growth_tracker"]}
        moments = optimizer_state(self.optimizer, self.updated_params())
        return {
            "params": self.master_params(),
            "buffers": self.buffers(),
            "optimizer": {kind: self.as_shown(tensors) for kind, tensors in moments.items()},
            "loss_scale": loss_scale,
        }

    def load_state_dict(self, state: State) -> None:
        copy_into(self.own_params(), state["params"])
        put_buffers(self.model, state["buffers"])
        load_optimizer_state(self.optimizer, self.updated_params(), state["optimizer"])
        loss_scale = state["loss_scale"]
        moves = hasattr(self, "scaler") and self.scaler.is_enabled() and self.static_scale is None
        if moves and "scale" in loss_scale:
            own = {"scale": loss_scale["scale"], "_growth_tracker": int(loss_scale.get("growth_tracker", 0))}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **own})

    def memory_model(self) -> MemoryModel:
        peak_of = type(self).peak_of
        if peak_of is None:
            return {}
        try:
            return peak_of(plain_mlp(self.model, self.task), self.precision)
        except BackendUnavailable:  # other networks have no model
            return {}


def skipped_by(step: Callable[[], object], optimizer: torch.optim.Optimizer) -> bool | Tensor:
    """Calls ``step``. Returns whether it left out the optimizer's step, or the optimizer left out its own update.

    GradScaler leaves ``optimizer.step()`` out to skip. A fused optimizer is called all the same, and skips by itself
    where its ``found_inf`` is not 0. GradScaler removes ``found_inf`` after the step.
    """
    skipped: bool | Tensor = True

    def stepped(*_: object) -> None:
        nonlocal skipped
        skipped = getattr(optimizer, "found_inf", False)

    with optimizer.register_step_post_hook(stepped):
        step()
    return skipped


def share_of_step(task: Task, loss: Tensor, share: Tensor | None = None) -> Tensor:
    """Returns a micro-batch's share of the step's loss, which is the mean over the whole batch. ``share`` is
    ``Phased.share``; None: all micro-batches count alike."""
    if share is not None:
        return loss * share
    return loss / task.accumulate if task.accumulate > 1 else loss


def clip_gradients(task: Task, parameters: Iterable[Tensor]) -> Tensor | None:
    """Calls ``torch.nn.utils.clip_grad_norm_`` where the task clips. Returns the norm before, an fp32 scalar.

    A norm of inf makes every gradient 0 or NaN, without harm: GradScaler has seen the inf and skips the step.
    """
    if task.clip_norm is None:
        return None
    return nn.utils.clip_grad_norm_(parameters, task.clip_norm, task.clip_norm_type)


def set_lr(optimizer: torch.optim.Optimizer, lr: float | Tensor) -> None:
    """Sets the learning rate of the next step, as torch's schedulers do; a parameter group has a multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"] if "lr_factor" in group else lr


def in_fp32(tensors: Params) -> Params:
    """Returns tensors of 16 bits in fp32, for which the harness asks, and which holds each of their numbers."""
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def copy_into(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Writes ``values`` into the tensors of the same names."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])


def optimizer_state(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, Params]:
    """Returns the state of torch's optimizer as ``State["optimizer"]`` has it: by kind and name of parameter."""
    state: dict[str, Params] = {}
    for name, p in params.items():
        for kind, value in optimizer.state.get(p, {}).items():
            if value is not None:  # None: the momentum of a parameter that had no gradient so far
                state.setdefault(kind, {})[name] = value if isinstance(value, Tensor) else torch.tensor(value)
    return state


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], state: Mapping[str, Params]
) -> None:
    """Loads what :func:`optimizer_state` returns. Momentum that a fused optimizer had, and the state has not, is 0: the
    optimizer would make it anew, and leave it unfilled if the first step is skipped."""
    numbers = {p: i for i, p in enumerate(params_in(optimizer))}
    by_number: dict[int, dict[str, Any]] = {}
    for kind, values in state.items():
        for name, value in values.items():
            if params[name] in numbers:
                # torch keeps counts of updates on the CPU, and moves them itself where it needs them on the device.
                value = value.detach().clone() if kind != "step" else value.detach().cpu().clone()
                whole = not value.dim() and value.dtype is torch.int64  # a number of Python's
                by_number.setdefault(numbers[params[name]], {})[kind] = int(value) if whole else value
    fused = [p for group in optimizer.param_groups if group.get("fused") for p in group["params"]]
    filled = [p for p in fused if "momentum_buffer" in optimizer.state.get(p, {})]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": by_number})
    for p in filled:
        optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))


def gradient_dtype(model: nn.Module) -> torch.dtype:
    """Returns the dtype of the gradient of the first parameter that has one; fp32 where none has."""
    return next((p.grad.dtype for p in model.parameters() if p.grad is not None), torch.float32)


def require_kernels(model: nn.Module, device_type: str, precision: str, backend: str) -> None:
    """Raises BackendUnavailable where torch has no kernel for a recurrent layer: for none in fp16 on a CPU, and for an
    LSTM in bf16 only on a CPU with AVX-512 (torch 2.15)."""
    if device_type != "cpu" or not PRECISIONS[precision].is_16_bit:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and not has_kernel(type(module), PRECISIONS[precision].storage):
            works = "bf16 and fp32 work" if has_kernel(type(module), BF16) else "fp32 works"
            missing = f"torch's CPU {type(module).__name__} has no {precision} (layer {name or 'itself'}); {works}"
            raise BackendUnavailable(f"backend={backend} precision={precision}: {missing}")


def has_kernel(layer: Callable[..., nn.Module], number_format: Format) -> bool:
    """Returns whether torch computes such a recurrent layer in a 16-bit format on this CPU, which a small one tells."""
    if number_format == FP16:
        return False
    try:
        # Computed even where tensors have no data, as when a footprint is counted.
        with _disable_current_modes(), torch.autocast("cpu", dtype=torch_dtype(number_format)):
            small = layer(1, 1, device="meta").to_empty(device="cpu")  # draws no weights
            small(torch.zeros(1, 1, 1))
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):  # "... descriptor for the LSTM forward propagation"
            raise
        return False
    return True
