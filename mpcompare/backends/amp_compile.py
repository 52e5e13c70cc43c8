"""``amp`` with forward, loss and their backward by ``torch.compile(mode="max-autotune")``, and a fused optimizer.

On CUDA the mode also replays forward and backward as CUDA graphs of its own. It takes the kernels that it has timed as
the fastest, and so another compilation may take others, with other last bits.
https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

import copy
import logging

import torch
import torch._inductor
from torch import Tensor, nn

from mpcompare.backends.amp import grad_scaler
from mpcompare.backends.layer_dtypes.compiled import layer_dtypes_of_compiled_step
from mpcompare.backends.torch_model import (
    TorchModel,
    clip_gradients,
    gradient_dtype,
    require_kernels,
    set_lr,
    share_of_step,
    step_or_skip,
)
from mpcompare.contract import BackendUnavailable, MemoryModel, ModuleDtypes
from mpcompare.dtypes import torch_dtype
from mpcompare.loss_scale import LossScale, StaticLossScale
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import Task

# The options of mode="max-autotune", since a mode and options exclude each other, and two more that keep tables of
# candidate kernels off stderr.
OPTIONS = {
    **torch._inductor.list_mode_options("max-autotune"),
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
# One process may compile so many shapes and precisions, where dynamo's default is 8. One more is an error with
# fullgraph; without it dynamo would go on eagerly.
torch._dynamo.config.recompile_limit = 64
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns of a toolkit without a GPU


def forward_and_loss(
    model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, device_type: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns loss and output. The module is an argument, so that another one of its shape is not compiled anew."""
    with torch.autocast(device_type, dtype=dtype):
        output = model(x)
        return loss_fn(output, y), output.detach()


whole_graph = torch.compile(forward_and_loss, fullgraph=True, dynamic=False, options=OPTIONS)
# Dynamo leaves recurrent layers to torch by default: unrolled, an LSTM of 64 steps would compile for minutes.
broken_at_recurrent_layers = torch.compile(forward_and_loss, dynamic=False, options=OPTIONS)


def require_compiler(device_type: str) -> None:
    """Raises BackendUnavailable where inductor has no compiler; compiles nothing."""
    from torch._inductor import cpp_builder, exc
    from torch.utils._triton import has_triton

    if device_type == "cuda" and not has_triton():
        raise BackendUnavailable(
            "backend=amp_compile needs Triton, which torch does not find or cannot use on this GPU"
        )
    if device_type == "cpu":
        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler as error:
            raise BackendUnavailable("backend=amp_compile needs a C++ compiler: install g++, or set CXX") from error


class AmpCompile(TorchModel):
    """``amp`` with forward and loss as one compiled function, which brings its backward. The optimizer is fused, and
    skips a step on the device."""

    PRECISIONS = ("fp16", "bf16")
    IDLE_PHASES: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        self.task = task
        self.device_type = next(model.parameters()).device.type
        require_compiler(self.device_type)
        require_kernels(model, self.device_type, precision, "amp_compile")
        self.compute_dtype = torch_dtype(PRECISIONS[precision].storage)
        recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
        self.forward_and_loss = broken_at_recurrent_layers if recurrent else whole_graph
        self.model = copy.deepcopy(model)
        self.optimizer = task.optimizer.make(self.model.parameters(), fused=True)
        self.scaler = grad_scaler(loss_scale, self.device_type)
        # A static scale is given to GradScaler.update(), which would choose one of its own.
        self.static_scale = loss_scale.init_scale if type(loss_scale) is StaticLossScale else None
        self.skipped: bool | Tensor = False
        # On CUDA inductor runs a compiled function once as it is, and captures it in the next call.
        self.warmup_steps = 2 if self.device_type == "cuda" else 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # the last step's loss and gradients may go
        self.loss, output = self.forward_and_loss(
            self.model, self.task.loss_fn, x, y, self.device_type, self.compute_dtype
        )
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()

    def backward(self) -> None:
        self.scaler.scale(share_of_step(self.task, self.loss)).backward()
        self.observed["gradients"] = gradient_dtype(self.model)

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def clip(self) -> None:
        self.grad_norm = clip_gradients(self.task, self.model)

    def step(self, lr: float | Tensor) -> None:
        set_lr(self.optimizer, lr)
        self.skipped = step_or_skip(self.scaler, self.optimizer)

    def update(self) -> None:
        self.scaler.update(self.static_scale)
        self.optimizer.zero_grad(set_to_none=True)

    def loss_scale(self) -> Tensor:
        return self.scaler.scale(torch.ones((), device=self.device_type))  # 1 * scale; get_scale() would wait

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        if self.forward_and_loss is broken_at_recurrent_layers:
            return {}  # no graph holds the whole step

        def loss_of(model: nn.Module) -> Tensor:
            return forward_and_loss(model, self.task.loss_fn, x, y, self.device_type, self.compute_dtype)[0]

        return layer_dtypes_of_compiled_step(self.model, self.master_params(), loss_of, OPTIONS)

    def memory_model(self) -> MemoryModel:
        return {}  # inductor chooses which tensors it keeps and which it computes again
