"""``amp`` with forward, loss and their backward by ``torch.compile(mode="max-autotune")``, and fused SGD.

On CUDA the mode also replays forward and backward as CUDA graphs of its own. Which kernels win its races differs from
one compilation to the next, and with them the last bits.
https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

import logging
from typing import Any

import torch
import torch._inductor
from torch import Tensor, nn

from mpcompare.backends.amp import grad_scaler
from mpcompare.contract import DTYPES, BackendUnavailable, MemoryModel, dtype_name
from mpcompare.loss_scale import LossScale, StaticLossScale
from mpcompare.tasks import mlp

# What mode="max-autotune" sets, since a mode and options exclude each other, and no tables of candidates on stderr.
OPTIONS = {
    **torch._inductor.list_mode_options("max-autotune"),
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
# Shapes and precisions that one process may compile, 8 unless it is said. With fullgraph one more is an error; without
# it dynamo would go on eagerly.
torch._dynamo.config.recompile_limit = 64
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of a CUDA toolkit without a GPU


@torch.compile(fullgraph=True, dynamic=False, options=OPTIONS)
def forward_and_loss(
    model: nn.Module, loss: str, x: Tensor, y: Tensor, device_type: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Loss and output. The module is an argument, so that another one of the same shape is not compiled anew."""
    with torch.autocast(device_type, dtype=dtype):
        output = model(x)
        return mlp.loss_fn(loss, output, y), output.detach()


def require_compiler(device_type: str) -> None:
    """Raises BackendUnavailable where inductor has nothing to compile with; compiles nothing."""
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


class AmpCompile:
    """``amp`` whose forward and loss are one compiled function, backward with it; SGD skips on the device."""

    PRECISIONS = ("fp16", "bf16")
    IDLE_PHASES: tuple[str, ...] = ()
    engine = "torch"

    def __init__(self, params: mlp.Params, task: mlp.Task, precision: str, loss_scale: LossScale, engine: str) -> None:
        self.task = task
        self.device_type = params["W1"].device.type
        require_compiler(self.device_type)
        self.compute_dtype = DTYPES[precision]
        self.model = mlp.to_module(params)
        self.weight = next(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=task.lr, momentum=task.momentum, fused=True)
        if task.momentum:  # fused SGD makes buffers of its own in the first step, and skipping that never fills them
            for p in self.model.parameters():
                self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.scaler = grad_scaler(loss_scale, self.device_type)
        # GradScaler.update() takes the next scale where it is not to choose one.
        self.static_scale = loss_scale.init_scale if type(loss_scale) is StaticLossScale else None
        self.optimizer.register_step_post_hook(self._stepped)
        self.skipped: bool | Tensor = False

    def _stepped(self, *_: object) -> None:
        self.skipped = getattr(self.optimizer, "found_inf", False)  # GradScaler takes it away again after the step

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # from here on the last step's loss and gradients are overwritten
        self.loss, output = forward_and_loss(self.model, self.task.loss, x, y, self.device_type, self.compute_dtype)
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()

    def backward(self) -> None:
        self.scaler.scale(self.loss).backward()
        self.observed["gradients"] = self.weight.grad.dtype  # type: ignore[union-attr]

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.scaler.step(self.optimizer)

    def update(self) -> None:
        self.scaler.update(self.static_scale)
        self.optimizer.zero_grad(set_to_none=True)

    def master_params(self) -> mlp.Params:
        return mlp.module_params(self.model)

    def grads(self) -> mlp.Params:
        return mlp.module_grads(self.model)

    def loss_scale(self) -> Tensor:
        return self.scaler.scale(torch.ones((), device=self.device_type))  # 1 * scale, without the wait of get_scale()

    def dtypes(self) -> dict[str, str]:
        state = self.optimizer.state[self.weight].get("momentum_buffer")
        optimizer = self.weight if state is None else state  # plain SGD has no state: it computes in the weight's dtype
        observed = {"params": self.weight.dtype, **self.observed, "optimizer": optimizer.dtype}
        return {name: dtype_name(dtype) for name, dtype in observed.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    @staticmethod
    def memory_model(task: mlp.Task, precision: str, engine: str) -> MemoryModel:
        return {}  # what inductor keeps and what it computes again is its own choice
