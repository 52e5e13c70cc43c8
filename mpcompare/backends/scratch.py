"""Mixed precision training from scratch: no autograd, no autocast, one matrix product. Read it top to bottom.

Mixed precision keeps the large tensors and the matrix products in 16 bits, which halves the memory traffic and reaches
the fast matrix units, and still trains like FP32. Three techniques make that true (Micikevicius et al., "Mixed
Precision Training", arXiv 1710.03740, section 3); each is marked below where it happens:

    (1) FP32 master weights     an update lr * dW is often smaller than half the gap between two 16-bit neighbours of W
                                and would be rounded away, so the optimizer updates an fp32 copy (section 3.1)
    (2) loss scaling            fp16 has no numbers below 2^-24, and many gradients are smaller, so they are computed
                                times a scale, and divided by it in fp32 (section 3.2; bf16 has fp32's range: no need)
    (3) arithmetic precision    products of 16-bit numbers are summed in fp32, and so are long reductions such as
                                softmax and the loss; only the result is rounded to 16 bits (section 3.3)

The network: z_0 = x, a_l = z_{l-1} W_l + b_l, z_l = relu(a_l), output = a_L. A name starting with d is the gradient of
the scaled loss with respect to what follows: dW1 is dLoss/dW_1. Shapes: n rows of a batch, W_l is [in, out].

Each technique can be taken away, to see what it is good for: ``master_params=False``, ``loss_scale=none``,
``accumulate`` and ``softmax`` other than fp32 (python -m mpcompare +experiment=ablations).

The matrix product is ``gemm(A, B, C, trans_a, trans_b, alpha, beta)``: C = alpha op(A) op(B) + beta C, summed in fp32.
On CUDA it is one ``cublasGemmEx`` call, csrc/cuda/gemm.cu; on a CPU it is csrc/cpu/multiply.hpp.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.watch.modules import mlp_dtypes
from mpcompare.contract import MemoryModel, ModuleDtypes
from mpcompare.cost import memory
from mpcompare.errors import check_choice, check_flag
from mpcompare.loss_scale import LossScale
from mpcompare.native import ops
from mpcompare.precision import DTYPES, dtype_name
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.tasks.task import Params, Task


def cross_entropy(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of ``logits`` [n, c] for classes ``y`` [n], and its gradient [n, c].

    loss = mean_i(log sum_j exp(logits_ij) - logits_iy)        dlogits = (softmax(logits) - onehot(y)) / n
    """
    n = len(logits)
    shifted = logits - logits.amax(dim=1, keepdim=True)  # the same softmax, and exp cannot overflow
    log_probs = shifted - shifted.exp().sum(dim=1, keepdim=True).log()
    rows = torch.arange(n, device=y.device)
    loss = -log_probs[rows, y].mean()
    dlogits = log_probs.exp()
    dlogits[rows, y] -= 1
    return loss, dlogits.div_(n)


def mse(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squared error over all elements of ``output`` [n, out], and its gradient, 2 (output - y) / (n out)."""
    difference = output - y.to(output.dtype)
    return difference.square().mean(), difference * (2 / difference.numel())


def mask_relu_(dz: Tensor, z: Tensor) -> Tensor:
    """0 where ``z <= 0``, else ``dz``, in place: no mask in memory. The derivative of z = relu(a) needs only z."""
    return torch.ops.aten.threshold_backward.grad_input(dz, z, 0, grad_input=dz)


class Scratch:
    """The five phases by hand. With ``precision=fp32`` every cast below is the identity: the same step in FP32."""

    PRECISIONS = ("fp16", "bf16", "fp32", "tf32")
    IDLE_PHASES: tuple[str, ...] = ()

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        precision: str,
        loss_scale: LossScale,
        engine: str = "auto",
        master_params: bool = True,
        accumulate: str = "fp32",
        softmax: str = "fp32",
    ) -> None:
        check_flag("backend.master_params", master_params)
        check_choice("backend.accumulate", accumulate, ("fp32", "fp16", "bf16"))
        check_choice("backend.softmax", softmax, ("fp32", "fp16", "bf16"))
        self.mlp = plain_mlp(model, task, "backend=scratch")  # names and widths of the layers
        params = self.mlp.by_hand(dict(model.named_parameters()))  # W1 [in, out], b1 [out], W2, b2, ...
        self.precision, self.softmax = precision, softmax
        self.compute_dtype, self.loss_dtype = DTYPES[precision], DTYPES[softmax]
        device = params["W1"].device
        self.engine, self.gemm = ops.select_gemm(engine, device, self.compute_dtype, DTYPES[accumulate])  # (3)
        self.loss_of = cross_entropy if self.mlp.loss == "cross_entropy" else mse
        self.lr, self.momentum = self.mlp.lr, self.mlp.momentum
        self.layers = range(1, len(self.mlp.sizes))  # 1 .. L
        self.scaling = loss_scale
        dtype = torch.float32 if master_params else self.compute_dtype
        rows = torch.contiguous_format
        self.masters = {
            k: p.to(dtype, copy=True, memory_format=rows) for k, p in params.items()
        }  # (1) the fp32 masters
        self.velocity = {name: torch.zeros_like(p) for name, p in self.masters.items()} if self.momentum else {}
        self.skipped = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # (1) The compute copies: 16-bit weights, made anew from the masters in every step.
        self.params = {name: p.to(self.compute_dtype) for name, p in self.masters.items()}
        self.z = [x.flatten(1).to(self.compute_dtype)]  # z_0 [n, in]
        for layer in self.layers:
            W, b = self.params[f"W{layer}"], self.params[f"b{layer}"]
            a = b.new_empty(len(x), len(b)).copy_(b)  # [n, out]: every row starts as the bias ...
            self.gemm(self.z[-1], W, a, beta=1.0)  # ... a_l = z_{l-1} W_l + b_l: (3) summed in fp32, rounded once
            self.z.append(a.relu_() if layer < len(self.layers) else a)
        logits = self.z.pop()
        loss, self.dlogits = self.loss_of(logits.to(self.loss_dtype), y)  # (3) softmax and loss in fp32
        self.observed = {"activations": logits.dtype, "loss": loss.dtype}
        return loss.float()

    def backward(self) -> None:
        # (2) Scaling the loss scales every gradient, by the chain rule; here that starts at the logits' gradient.
        da = (self.dlogits * self.scaling.scale).to(self.compute_dtype)  # da_L [n, out]
        del self.dlogits
        self.scaled_grads: Params = {}
        for layer in reversed(self.layers):
            z, W = self.z.pop(), self.params[f"W{layer}"]  # z_{l-1} [n, in]
            dW = torch.empty_like(W)
            self.gemm(z, da, dW, trans_a=True)  # dW_l = z_{l-1}^T da_l   [in, n] [n, out]
            self.scaled_grads[f"W{layer}"] = dW
            self.scaled_grads[f"b{layer}"] = da.sum(dim=0)  # db_l = 1^T da_l; torch sums 16-bit numbers in fp32
            if layer > 1:
                dz = torch.empty_like(z)
                self.gemm(da, W, dz, trans_b=True)  # dz_{l-1} = da_l W_l^T   [n, out] [out, in]
                da = mask_relu_(dz, z)  # da_{l-1}: dz_{l-1} where relu let a_{l-1} through
        del self.params

    def unscale(self) -> None:
        # (2) Back to the true gradients, in fp32: in fp16 the small ones would be lost after all.
        self.observed["gradients"] = self.scaled_grads["W1"].dtype
        self.found_inf = self.scaling.found_inf(self.scaled_grads.values())
        inv_scale = self.scaling.inv_scale
        self.unscaled = {name: self.scaled_grads.pop(name).float().mul_(inv_scale) for name in self.masters}

    def step(self) -> None:
        self.skipped = self.found_inf  # (2) the scale was too large: leave every weight bit for bit as it is
        if self.skipped:
            return
        for name, master in self.masters.items():
            g = self.unscaled[name]
            if self.momentum:
                g = self.velocity[name].mul_(self.momentum).add_(g)  # v = momentum v + g
            master.add_(g, alpha=-self.lr)  # (1) w = w - lr g, in fp32

    def update(self) -> None:
        self.scaling.update(self.found_inf)  # (2) grow after many good steps, back off after an overflow
        del self.unscaled

    # What the harness asks, outside the step.

    def master_params(self) -> Params:
        return self.mlp.named({name: p.float() for name, p in self.masters.items()})

    def buffers(self) -> Params:
        return {}

    def grads(self) -> Params:
        return self.mlp.named(self.unscaled)

    def loss_scale(self) -> float:
        return self.scaling.scale

    def dtypes(self) -> dict[str, str]:
        optimizer = self.velocity.get("W1", self.masters["W1"])  # plain SGD has no state: it computes in the masters'
        observed = {"params": self.masters["W1"].dtype, **self.observed, "optimizer": optimizer.dtype}
        return {name: dtype_name(dtype) for name, dtype in observed.items()}

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        loss = self.forward(x, y)
        params, z = self.params, [*(z.dtype for z in self.z), self.observed["activations"]]
        softmax = {"input": z[-1], "computes": self.dlogits.dtype, "output": loss.dtype, "backward": self.dlogits.dtype}
        self.backward()
        return mlp_dtypes(self.mlp, self.masters, params, z, self.scaled_grads, softmax)

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.masters, "velocity": self.velocity, "scaling": dict(vars(self.scaling))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, theirs in ((self.masters, state["masters"]), (self.velocity, state["velocity"])):
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])
        vars(self.scaling).update(state["scaling"])

    def memory_model(self) -> MemoryModel:
        if self.engine != "native":
            return {}
        fp32_masters = self.masters["W1"].dtype is torch.float32
        return memory.scratch_peak(self.mlp, self.precision, fp32_masters, self.softmax)
