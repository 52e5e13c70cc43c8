"""``amp`` with forward, loss and their backward by ``torch.compile(mode="max-autotune")``, and a fused optimizer.

On CUDA the mode also replays forward and backward as CUDA graphs of its own. It takes the kernels that it has timed as
the fastest, and so another compilation may take others, with other last bits.
https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

import logging

import torch
import torch._inductor
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.layer_dtypes.compiled import layer_dtypes_of_compiled_step
from mpcompare.contract import BackendUnavailable, ModuleDtypes
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import Task

# The options of mode="max-autotune", since a mode and options exclude each other, and two more that keep tables of
# candidate kernels off stderr.
OPTIONS = {
    **torch._inductor.list_mode_options("max-autotune"),
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
# One process may compile so many shapes and precisions; dynamo's default is 8. One more is an error with fullgraph.
# Without fullgraph dynamo would go on eagerly.
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
        needs = "needs Triton, which torch does not find or cannot use on this GPU"
        raise BackendUnavailable(f"backend=amp_compile {needs}")
    if device_type == "cpu":
        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler as error:
            raise BackendUnavailable("backend=amp_compile needs a C++ compiler: install g++, or set CXX") from error


class AmpCompile(Amp):
    """``amp`` with forward and loss as one compiled function. The compiler makes its backward, too. The optimizer is
    fused, and skips a step on the device."""

    name = "amp_compile"
    called_module = None  # the layers of a compiled step call no hooks
    peak_of = None  # inductor chooses which tensors it keeps and which it computes again

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        device_type = next(model.parameters()).device.type
        require_compiler(device_type)
        super().__init__(model, task, precision, loss_scale)
        self.optimizer = task.optimizer.make(self.model.named_parameters(), fused=True)
        recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
        self.forward_and_loss = broken_at_recurrent_layers if recurrent else whole_graph
        # On CUDA inductor runs a compiled function once as it is, and captures it in the next call.
        self.warmup_steps = 2 if device_type == "cuda" else 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # the last step's loss and gradients may go
        loss, output = self.forward_and_loss(self.model, self.task.loss_fn, x, y, self.device_type, self.compute_dtype)
        return self.observe(output, loss)

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        if self.forward_and_loss is broken_at_recurrent_layers:
            return {}  # no graph holds the whole step

        def loss_of(model: nn.Module) -> Tensor:
            return forward_and_loss(model, self.task.loss_fn, x, y, self.device_type, self.compute_dtype)[0]

        return layer_dtypes_of_compiled_step(self.model, self.master_params(), loss_of, OPTIONS)
