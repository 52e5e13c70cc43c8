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

A step does more, in an order that is fixed: the gradients of several micro-batches are added (``task.accumulate``),
unscaled, clipped (``task.clip_norm``), and given to the optimizer. Each waits for the one before it: a norm of scaled
gradients is ``loss_scale`` times too large, and an optimizer that has seen an inf keeps it.

Each technique can be taken away, to see its use: ``master_params=False``, ``loss_scale=none``,
``accumulate_dtype`` and ``softmax`` other than fp32 (python -m mpcompare +experiment=ablations).

The matrix product is ``gemm(A, B, C, trans_a, trans_b, alpha, beta)``: C = alpha op(A) op(B) + beta C, summed in fp32.
On CUDA it is one ``cublasGemmEx`` call, csrc/cuda/gemm.cu; on a CPU it is csrc/cpu/multiply.hpp.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.layer_dtypes.table import layer_dtypes_of_mlp
from mpcompare.backends.memory_models.scratch import scratch_peak
from mpcompare.contract import MemoryModel, ModuleDtypes, State
from mpcompare.dtypes import dtype_name, torch_dtype
from mpcompare.errors import check_choice, check_flag
from mpcompare.loss_scale import LossScale, load_state, state_of
from mpcompare.native import ops
from mpcompare.operands import Products
from mpcompare.precision import FORMATS, PRECISIONS
from mpcompare.tasks.groups import in_group
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
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


def sgd(optimizer: Sgd, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
    """``g = g + weight_decay w; v = momentum v + g; w = w - lr v``, or ``w - lr (g + momentum v)`` with nesterov."""
    if optimizer.weight_decay:
        g = g.add(w, alpha=optimizer.weight_decay)
    if optimizer.momentum:
        v = remembered["momentum_buffer"].mul_(optimizer.momentum).add_(g)
        g = g.add(v, alpha=optimizer.momentum) if optimizer.nesterov else v
    w.add_(g, alpha=-lr)


def adam(optimizer: Adam | AdamW, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
    """``w = w - lr m / (sqrt(v) + eps)`` of the means m of g and v of g^2 (Kingma and Ba, arXiv 1412.6980).

    Mixed precision keeps m and v in fp32, as it does the masters:
    v = beta2 v + (1 - beta2) g^2 moves by a thousandth of itself in a step (beta2 = 0.999), and the gap between two
    bf16 neighbours is 1/128 of them: in bf16 v would never change again. And g^2 of a gradient of 1e-5 is 1e-10, below
    the smallest fp16 number, and so is eps = 1e-8: in fp16 the step would be m / (0 + 0).
    AdamW decays the weight itself, by lr weight_decay (Loshchilov and Hutter, arXiv 1711.05101). Adam adds the decay to
    the gradient, where the division by sqrt(v) takes most of it away again.
    """
    beta1, beta2 = optimizer.betas
    if isinstance(optimizer, AdamW):
        w.mul_(1 - lr * optimizer.weight_decay)
    elif optimizer.weight_decay:
        g = g.add(w, alpha=optimizer.weight_decay)
    updates = int(remembered["step"].add_(1))  # skipped steps do not count
    m = remembered["exp_avg"].lerp_(g, 1 - beta1)  # m = beta1 m + (1 - beta1) g
    v = remembered["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
    # Both start at 0 and are too small by 1 - beta^updates at first.
    denominator = v.div(1 - beta2**updates).sqrt_().add_(optimizer.eps)
    w.addcdiv_(m, denominator, value=-lr / (1 - beta1**updates))


class Scratch:
    """The six phases by hand. With ``precision=fp32`` every cast below changes nothing: the same step in FP32."""

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
        accumulate_dtype: str = "fp32",
        softmax: str = "fp32",
    ) -> None:
        check_flag("backend.master_params", master_params)
        check_choice("backend.accumulate_dtype", accumulate_dtype, ("fp32", "fp16", "bf16"))
        check_choice("backend.softmax", softmax, ("fp32", "fp16", "bf16"))
        self.mlp = plain_mlp(model, task, "backend=scratch")  # names and widths of the layers
        params = self.mlp.by_hand(dict(model.named_parameters()))  # W1 [in, out], b1 [out], W2, b2, ...
        self.precision, self.softmax = precision, softmax
        self.compute_dtype = torch_dtype(PRECISIONS[precision].storage)
        self.loss_dtype = torch_dtype(FORMATS[softmax])
        device = params["W1"].device
        accumulate = torch_dtype(FORMATS[accumulate_dtype])
        self.engine, self.gemm = ops.select_gemm(engine, device, self.compute_dtype, accumulate)  # (3)
        self.loss_of = cross_entropy if self.mlp.loss == "cross_entropy" else mse
        self.task, self.optimizer = task, self.mlp.optimizer
        self.layers = range(1, len(self.mlp.sizes))  # 1 .. L
        self.scaling = loss_scale
        dtype = torch.float32 if master_params else self.compute_dtype
        rows = torch.contiguous_format
        self.masters = {
            k: p.to(dtype, copy=True, memory_format=rows) for k, p in params.items()
        }  # (1) the fp32 masters
        self.remembered = {name: self.optimizer.initial_state(p) for name, p in self.masters.items()}
        self.scaled_grads: Params = {}
        self.skipped = False
        self.grad_norm: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # (1) The compute copies: 16-bit weights, made anew from the masters in every step.
        self.params = {name: p.to(self.compute_dtype) for name, p in self.masters.items()}
        self.z = [self.mlp.rows_of(x, y).to(self.compute_dtype)]  # z_0 [n, in]
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
        # (2) Scaling the loss scales every gradient, by the chain rule; here that starts at the logits' gradient. The
        # loss of a step is the mean over its micro-batches.
        da = (self.dlogits * (self.scaling.scale / self.task.accumulate)).to(self.compute_dtype)  # da_L [n, out]
        del self.dlogits
        for layer in reversed(self.layers):
            z, W = self.z.pop(), self.params[f"W{layer}"]  # z_{l-1} [n, in]
            dW = torch.empty_like(W)
            self.gemm(z, da, dW, trans_a=True)  # dW_l = z_{l-1}^T da_l   [in, n] [n, out]
            self.add_gradient(f"W{layer}", dW)
            self.add_gradient(f"b{layer}", da.sum(dim=0))  # db_l = 1^T da_l; torch sums 16-bit numbers in fp32
            if layer > 1:
                dz = torch.empty_like(z)
                self.gemm(da, W, dz, trans_b=True)  # dz_{l-1} = da_l W_l^T   [n, out] [out, in]
                da = mask_relu_(dz, z)  # da_{l-1}: dz_{l-1} where relu let a_{l-1} through
        del self.params

    def add_gradient(self, name: str, g: Tensor) -> None:
        """(3) Micro-batches are summed in fp32. An inf in any of them stays in the sum: the step will be skipped."""
        self.observed["gradients"] = g.dtype
        if self.task.accumulate == 1:
            self.scaled_grads[name] = g
        elif name in self.scaled_grads:
            self.scaled_grads[name].add_(g)
        else:
            self.scaled_grads[name] = g.float()

    def unscale(self) -> None:
        # (2) Back to the true gradients, in fp32: in fp16 the small ones would be lost after all.
        self.found_inf = self.scaling.found_inf(self.scaled_grads.values())
        inv_scale = self.scaling.inv_scale
        self.unscaled = {name: self.scaled_grads.pop(name).float().mul_(inv_scale) for name in self.masters}

    def clip(self) -> None:
        if self.task.clip_norm is None:
            return
        norms = [torch.linalg.vector_norm(g, self.task.clip_norm_type) for g in self.unscaled.values()]
        self.grad_norm = torch.linalg.vector_norm(torch.stack(norms), self.task.clip_norm_type)  # all as one vector
        factor = (self.task.clip_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_'s
        for g in self.unscaled.values():
            g.mul_(factor)  # one factor for all: the direction stays

    def step(self, lr: float | Tensor) -> None:
        self.skipped = self.found_inf  # (2) the scale was too large: leave every weight bit for bit as it is
        if self.skipped:
            return
        lr = float(lr)
        for name, master in self.masters.items():  # (1) in fp32
            # A parameter group has a weight decay of its own, and a learning rate that is a multiple of lr.
            optimizer, factor = in_group(self.optimizer, self.mlp.names[name], master.dim())
            if isinstance(optimizer, Sgd):
                sgd(optimizer, master, self.unscaled[name], self.remembered[name], factor * lr)
            else:
                adam(optimizer, master, self.unscaled[name], self.remembered[name], factor * lr)

    def update(self) -> None:
        self.scaling.update(self.found_inf)  # (2) grow after many good steps, back off after an overflow
        del self.unscaled

    # The harness asks for the following outside of the step.

    def master_params(self) -> Params:
        return self.mlp.named({name: p.float() for name, p in self.masters.items()})

    def buffers(self) -> Params:
        return {}

    def grads(self) -> Params:
        return self.mlp.named(self.unscaled)

    def loss_scale(self) -> float:
        return self.scaling.scale

    @contextmanager
    def watched_products(self) -> Iterator[Products]:
        gemm, products = self.gemm, Products(self.mlp.layers)

        def watched(a: Tensor, b: Tensor, out: Tensor, *, trans_a: bool = False, **how: Any) -> None:
            gemm(a, b, out, trans_a=trans_a, **how)
            if trans_a:
                products.backward(b)  # da_l, in the product that makes dW_l
            elif "trans_b" not in how:
                products.forward(a, out)  # z_{l-1} and a_l

        self.gemm = watched
        try:
            yield products
        finally:
            self.gemm = gemm

    def dtypes(self) -> dict[str, str]:
        # Plain SGD has no state: it computes in the masters' dtype.
        optimizer = next((t for t in self.remembered["W1"].values() if t.dim()), self.masters["W1"])
        observed = {"params": self.masters["W1"].dtype, **self.observed, "optimizer": optimizer.dtype}
        return {name: dtype_name(dtype) for name, dtype in observed.items()}

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        loss = self.forward(x, y)
        params, z = self.params, [*(z.dtype for z in self.z), self.observed["activations"]]
        softmax = {"input": z[-1], "computes": self.dlogits.dtype, "output": loss.dtype, "backward": self.dlogits.dtype}
        self.backward()
        grads, self.scaled_grads = self.scaled_grads, {}
        return layer_dtypes_of_mlp(self.mlp, self.masters, params, z, grads, softmax)

    def state_dict(self) -> State:
        return {
            "params": self.master_params(),
            "buffers": {},
            "optimizer": {
                kind: self.mlp.named({name: remembered[kind].float() for name, remembered in self.remembered.items()})
                for kind in self.remembered["W1"]
            },
            "loss_scale": state_of(self.scaling),
        }

    def load_state_dict(self, state: State) -> None:
        for name, value in self.mlp.by_hand(state["params"]).items():
            self.masters[name].copy_(value)
        for kind in self.remembered["W1"]:
            values = self.mlp.by_hand(state["optimizer"].get(kind, {}))  # none before the first update
            for name, remembered in self.remembered.items():
                remembered[kind].copy_(values[name]) if name in values else remembered[kind].zero_()
        load_state(self.scaling, state["loss_scale"])

    def workspaces(self) -> dict[str, int]:
        return ops.workspaces(self.masters["W1"].device.type) if self.engine == "native" else {}

    def memory_model(self) -> MemoryModel:
        if self.engine != "native":
            return {}
        fp32_masters = self.masters["W1"].dtype is torch.float32
        return scratch_peak(self.mlp, self.precision, fp32_masters, self.softmax)
