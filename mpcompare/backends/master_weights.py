"""Mixed precision as it was done before autocast, by hand and for any module: a 16-bit network and fp32 masters.

The recipe of Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), and of NVIDIA's apex at level O2:

    the module is cast to 16 bits         its layers compute in the dtype of their weights: nothing is cast on the way
    norms and embeddings stay in fp32     both sum many numbers: a norm the statistics of its inputs, an embedding the
                                          gradients of each token
    buffers stay in fp32                  they are no weights: rotary frequencies in 16 bits are other frequencies
    the optimizer updates fp32 masters    and each step ends with a copy of the masters into the 16-bit weights
    the loss is scaled by hand            and its gradients are unscaled in fp32; no autocast, no GradScaler

Compared with ``amp`` this costs a 16-bit copy of the weights that is always live, and saves the casts of every forward.
Residual streams stay in 16 bits, where autocast promotes them to fp32.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from mpcompare.backends.torch_model import (
    TorchModel,
    clip_gradients,
    copy_into,
    in_fp32,
    require_kernels,
    set_lr,
    share_of_step,
)
from mpcompare.contract import State
from mpcompare.dtypes import torch_dtype
from mpcompare.loss_scale import LossScale, load_state, state_of
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.cast import cast_module
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.task import Params, Task


class MasterWeights(TorchModel):
    """A 16-bit module, fp32 masters, loss scaling by hand."""

    PRECISIONS = ("fp16", "bf16")
    IDLE_PHASES: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        require_kernels(model, next(model.parameters()).device.type, precision, "master_weights")
        self.task, self.scaling, self.compute_dtype = task, loss_scale, torch_dtype(PRECISIONS[precision].storage)
        self.masters = {
            name: nn.Parameter(p.detach().to(torch.float32, copy=True)) for name, p in model.named_parameters()
        }
        self.model = copy_of(model)
        self.functions = cast_module(self.model, self.compute_dtype)
        self.params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = task.optimizer.make((name, self.masters[name]) for name in self.params)
        self.skipped = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.model(x.to(self.compute_dtype) if x.is_floating_point() else x)
        return self.observe(output, self.task.loss_fn(output.float(), y))  # softmax and loss in fp32

    def backward(self) -> None:
        loss = share_of_step(self.task, self.loss, self.share) * self.scaling.scale
        with self.functions.in_backward():
            torch.autograd.backward([get_gradient_edge(loss)], [torch.ones_like(loss)])
        grads = {name: p.grad for name, p in self.params.items() if p.grad is not None}
        self.observed["gradients"] = min(
            (g.dtype for g in grads.values()), key=lambda dtype: dtype.itemsize, default=torch.float32
        )
        for name, g in grads.items():  # summed in fp32: 16 bits would round later micro-batches away
            master = self.masters[name]
            master.grad = g.float() if master.grad is None else master.grad.add_(g)
            self.params[name].grad = None

    def unscale(self) -> None:
        scaled = [master.grad for master in self.masters.values() if master.grad is not None]
        self.found_inf = self.scaling.found_inf(scaled)
        for g in scaled:
            g.mul_(self.scaling.inv_scale)

    def clip(self) -> None:
        self.grad_norm = clip_gradients(self.task, self.masters.values())

    def step(self, lr: float | Tensor) -> None:
        self.skipped = self.found_inf
        if self.skipped:
            return
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(self.masters[name])

    def update(self) -> None:
        self.scaling.update(self.found_inf)
        self.optimizer.zero_grad(set_to_none=True)

    # The harness asks for the following outside of the step.

    def master_params(self) -> Params:
        return {name: master.detach() for name, master in self.masters.items()}

    def grads(self) -> Params:
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def loss_scale(self) -> float:
        return self.scaling.scale

    def updated_params(self) -> Mapping[str, nn.Parameter]:
        return self.masters

    def state_dict(self) -> State:
        return {**super().state_dict(), "buffers": in_fp32(self.buffers()), "loss_scale": state_of(self.scaling)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        copy_into(self.master_params(), state["params"])
        load_state(self.scaling, state["loss_scale"])
