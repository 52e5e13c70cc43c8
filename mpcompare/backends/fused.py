"""The mathematics of ``scratch``, step for step, in as few passes over memory as the operators allow.

Read ``scratch`` first. What differs is where the work happens:

    bias and relu                  in the store of the forward product
    softmax, loss, its gradient    one pass over the logits, in forward()
    relu's mask, bias gradient     in the store of the product that makes dz; dz_l overwrites z_l
    unscale, SGD, 16-bit copies    one pass over the parameters, in step(); the copies are ready for the next forward()

All buffers are made once. The 16-bit gradients are unscaled inside the update; only ``grads()`` makes fp32 ones. The
search for inf and NaN stays a pass of its own: no weight may change before every gradient is known to be finite.
"""

from typing import Any

import torch
from torch import Tensor

from mpcompare import memory, ops
from mpcompare.backend import DTYPES, BackendUnavailable, MemoryModel, dtype_name
from mpcompare.build import BuildError
from mpcompare.errors import InputError
from mpcompare.loss_scale import LossScale
from mpcompare.mlp import Params, Task


class Fused:
    """Manual mixed precision with fused native operators; the same contract and the same rules as ``scratch``."""

    PRECISIONS = ("fp16", "bf16", "fp32", "tf32")
    IDLE_PHASES: tuple[str, ...] = ()
    engine = "native"

    def __init__(self, params: Params, task: Task, precision: str, loss_scale: LossScale, engine: str) -> None:
        device, dtype, n = params["W1"].device, DTYPES[precision], task.batch_size
        if engine == "torch":
            raise InputError("engine", engine, "backend=fused accepts one of auto, native")
        try:
            ops.load(device.type)
        except BuildError as error:
            raise BackendUnavailable(f"backend=fused needs the native operators: {error}") from error
        self.loss_of = ops.cross_entropy if task.loss == "cross_entropy" else ops.mse
        self.lr, self.momentum = task.lr, task.momentum
        self.layers = range(1, len(task.sizes))  # 1 .. L
        self.scaling = loss_scale
        self.masters = {name: p.clone() for name, p in params.items()}
        self.velocity = {name: torch.zeros_like(p) for name, p in params.items()} if task.momentum else {}
        self.params = {name: p.to(dtype) for name, p in self.masters.items()}  # in fp32 the masters themselves
        self.scaled_grads = {name: torch.empty_like(p) for name, p in self.params.items()}
        z0 = [] if dtype is torch.float32 else [torch.empty(n, task.in_features, dtype=dtype, device=device)]
        hidden = [torch.empty(n, width, dtype=dtype, device=device) for width in task.hidden]
        self.z0, self.hidden = z0, hidden
        self.logits = torch.empty(n, task.out_features, dtype=dtype, device=device)
        self.dlogits = torch.empty_like(self.logits)
        self.skipped = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.z = [self.z0[0].copy_(x) if self.z0 else x, *self.hidden]  # z_0 .. z_{L-1}
        for layer, out in zip(self.layers, [*self.hidden, self.logits], strict=True):
            W, b = self.params[f"W{layer}"], self.params[f"b{layer}"]
            ops.linear(self.z[layer - 1], W, b, out, relu=layer < len(self.layers))
        loss = torch.empty((), device=x.device)
        dbias = self.scaled_grads[f"b{len(self.layers)}"]
        self.loss_of(self.logits, y, self.dlogits, dbias, loss, loss_scale=self.scaling.scale)
        self.observed = {"activations": self.logits.dtype, "loss": loss.dtype}
        return loss

    def backward(self) -> None:
        da = self.dlogits  # da_L
        for layer in reversed(self.layers):
            z, W = self.z[layer - 1], self.params[f"W{layer}"]
            ops.native_gemm(z, da, self.scaled_grads[f"W{layer}"], trans_a=True)  # dW_l = z_{l-1}^T da_l
            if layer > 1:
                ops.relu_backward(da, W, z, self.scaled_grads[f"b{layer - 1}"])  # z_{l-1} becomes da_{l-1}
                da = z

    def unscale(self) -> None:
        self.observed["gradients"] = self.scaled_grads["W1"].dtype
        self.found_inf = self.scaling.found_inf(self.scaled_grads.values())

    def step(self) -> None:
        self.skipped = self.found_inf
        if self.skipped:
            return
        for name, master in self.masters.items():
            params = self.params[name] if self.params[name] is not master else None
            velocity, inv_scale = self.velocity.get(name), self.scaling.inv_scale
            grad = self.scaled_grads[name]
            ops.sgd(master, velocity, params, grad, lr=self.lr, momentum=self.momentum, inv_scale=inv_scale)

    def update(self) -> None:
        self.scaling.update(self.found_inf)

    def master_params(self) -> Params:
        return self.masters

    def grads(self) -> Params:
        return {name: g.float() * self.scaling.inv_scale for name, g in self.scaled_grads.items()}

    def loss_scale(self) -> float:
        return self.scaling.scale

    def dtypes(self) -> dict[str, str]:
        optimizer = self.velocity.get("W1", self.masters["W1"])  # plain SGD has no state: it computes in the masters'
        observed = {"params": self.masters["W1"].dtype, **self.observed, "optimizer": optimizer.dtype}
        return {name: dtype_name(dtype) for name, dtype in observed.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.masters, "velocity": self.velocity, "scaling": dict(vars(self.scaling))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, theirs in ((self.masters, state["masters"]), (self.velocity, state["velocity"])):
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])
        for name, master in self.masters.items():
            self.params[name].copy_(master)
        vars(self.scaling).update(state["scaling"])

    @staticmethod
    def memory_model(task: Task, precision: str, engine: str) -> MemoryModel:
        return memory.fused_peak(task, precision)
