"""The mathematics of ``scratch``, step for step, in as few passes over memory and as few launches as possible.

Read ``scratch`` first. Here the same work happens elsewhere:

    bias and relu                  in the store of the forward product
    softmax, loss, its gradient    one pass over the logits, in forward()
    relu's mask, bias gradient     with the product that makes dz; dz_l overwrites z_l
    search for inf and NaN         one pass over the 16-bit gradients, in unscale()
    the norm of all gradients      one pass over them, in clip(), where the task clips; step() applies their factor
    unscale, clip, SGD or Adam,    one pass over the parameters, in step(); the copies are ready for the next forward()
    16-bit copies

The search stays a pass of its own, and the optimizer stays out of the product that makes dW: a gradient overflows
where it is rounded to 16 bits, as with torch.amp, and no weight may change before every gradient is known to be finite.

The device decides whether to skip, by how much to clip, and the next loss scale: Python never waits. On a GPU the whole
step is one CUDA graph. All buffers are made once; native/flat.py lays out the parameters' buffers. dW_1 lies where the
16-bit W_1 was, because nothing reads W_1 any more by then; step() makes W_1 anew. If micro-batches follow, W_1 is
needed again: gradients then have a buffer of their own, and another in fp32 for their sums.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpcompare.backends.layer_dtypes.table import layer_dtypes_of_mlp
from mpcompare.backends.memory_models.fused import fused_peak
from mpcompare.contract import BackendUnavailable, Batches, MemoryModel, ModuleDtypes, State, take_step
from mpcompare.dtypes import dtype_name, torch_dtype
from mpcompare.errors import InputError, check_choice
from mpcompare.loss_scale import LossScale
from mpcompare.native import flat, ops
from mpcompare.native.build import BuildError
from mpcompare.native.device_scale import DeviceLossScale
from mpcompare.native.graph import WARMUP, StepGraph, require_cuda
from mpcompare.operands import Products
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.groups import refuse_groups
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.tasks.optimizers import AdamW, Sgd
from mpcompare.tasks.task import Params, Task


class Part(NamedTuple):
    """Tensors that belong together, element by element: fp32 masters, the optimizer's state, the scaled gradients, and
    copies of the masters in the compute dtype (None: the copies are made elsewhere)."""

    master: Tensor
    state: Params
    copies: Tensor | None
    grad: Tensor


def is_graphed(graph: bool | str, device: torch.device) -> bool:
    """Returns whether the option ``graph`` (true, false, auto) makes the step a CUDA graph on this device. Raises
    InputError for another value, and BackendUnavailable where a graph is asked for, and there are none."""
    if graph == "auto":
        return device.type == "cuda"
    if not isinstance(graph, bool):
        raise InputError("backend.graph", graph, "expected one of auto, true, false")
    if graph:
        require_cuda(device, "backend.graph=true")
    return graph


class Fused:
    """Manual mixed precision with fused native operators; the same contract and the same steps as ``scratch``.

    ``graph`` makes the whole step one CUDA graph; ``auto`` does so on a GPU. Only then is there a ``train_step()``.
    """

    PRECISIONS = ("fp16", "bf16", "fp32", "tf32")
    IDLE_PHASES: tuple[str, ...] = ()

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        precision: str,
        loss_scale: LossScale,
        engine: str = "auto",
        graph: bool | str = "auto",
    ) -> None:
        refuse_groups(task.optimizer, "backend=fused")
        self.mlp = plain_mlp(model, task, "backend=fused")
        self.task, self.optimizer, self.precision = task, self.mlp.optimizer, precision
        params = self.mlp.by_hand(dict(model.named_parameters()))
        self.device, self.dtype = params["W1"].device, torch_dtype(PRECISIONS[precision].storage)
        check_choice("engine", engine, ("auto", "native"))
        graphed = is_graphed(graph, self.device)
        try:
            ops.load(self.device.type)
        except BuildError as error:
            raise BackendUnavailable(f"backend=fused needs the native operators: {error}") from error
        self.warmup_steps = WARMUP if graphed else 0
        if graphed:
            self.graph = StepGraph(self._step)
            self.train_step = self._replay
        else:  # nobody sees the products of a graph
            self.watched_products = self._watched_products
        self.loss_of = getattr(torch.ops.mpcompare, self.mlp.loss)  # the operator of this name
        self.layers = range(1, len(self.mlp.sizes))  # 1 .. L
        self.scaling = DeviceLossScale(loss_scale, self.device)
        self.skipped = self.scaling.found_inf
        self._lay_out_parameters()
        self._set_masters(params)
        self._lay_out_batch(graphed)
        self._lay_out_scalars()
        self.micro_batches = 0  # the micro-batches of this step so far

    def _lay_out_parameters(self) -> None:
        """Makes the buffers that have an element for each of the parameters': masters, copies, optimizer state,
        gradients."""
        sizes, low = self.mlp.sizes, PRECISIONS[self.precision].is_16_bit
        self.flat_masters = masters = self._buffer(torch.float32)
        self.flat_copies = copies = self._buffer(self.dtype) if low else masters
        kinds = [kind for kind, value in self.optimizer.initial_state(masters[:0]).items() if value.dim()]
        remembered = {kind: self._buffer(torch.float32) for kind in kinds}
        self.parts: list[Part] = []
        if low and self.task.accumulate == 1:
            W1 = flat.sections(sizes)["W1"][1]
            grads = self._buffer(self.dtype, W1)
            self.scaled_grads = {"W1": flat.views(copies, sizes)["W1"], **flat.views(grads, sizes, W1)}
            for where, grad in ((slice(None, W1), copies[:W1]), (slice(W1, None), grads)):
                state = {kind: tensor[where] for kind, tensor in remembered.items()}
                self.parts.append(Part(masters[where], state, copies[where], grad))
        else:
            self.grads_of_one = self._buffer(self.dtype)
            self.sums = self._buffer(torch.float32) if self.task.accumulate > 1 else self.grads_of_one
            self.scaled_grads = flat.views(self.grads_of_one, sizes)
            self.parts.append(Part(masters, remembered, None, self.sums))
        self.masters, self.params = flat.views(masters, sizes), flat.views(copies, sizes)
        self.remembered = {kind: flat.views(tensor, sizes) for kind, tensor in remembered.items()}

    def _buffer(self, dtype: torch.dtype, begin: int = 0) -> Tensor:
        """Returns zeros for all parameters from the element ``begin`` on."""
        return torch.zeros(flat.elements(self.mlp.sizes) - begin, dtype=dtype, device=self.device)

    def _lay_out_batch(self, graphed: bool) -> None:
        """Makes the activations, and a place for the batch. A batch stays where it is given, unless it is cast, or a
        graph reads it, always from the same place."""
        sizes = self.mlp.sizes
        self.casts = graphed or self.dtype is not torch.float32
        self.inputs = [
            (self._rows(sizes[0]), self.mlp.empty_targets(self.device))
            for _ in range(self.task.accumulate if graphed else 0)
        ]
        z0 = self._rows(sizes[0]) if self.casts and not graphed else torch.empty(0)
        self.z = [z0, *(self._rows(width) for width in sizes[1:-1])]  # z_0 .. z_{L-1}
        self.logits, self.dlogits = self._rows(sizes[-1]), self._rows(sizes[-1])
        self.y = torch.empty(0)

    def _rows(self, width: int) -> Tensor:
        """Returns zeros ``[n, width]``, a row for each sample of a micro-batch."""
        return flat.matrix(self.mlp.rows, width, self.dtype, self.device)

    def _lay_out_scalars(self) -> None:
        """Makes the numbers of a step that stay on the device."""
        clips = self.task.clip_norm is not None
        self.updates, self.lr = self._scalar(0), self._scalar(0)
        self.loss, self.mean_loss = self._scalar(0), self._scalar(0)
        self.norm = torch.zeros((), dtype=torch.float64, device=self.device)
        self.grad_norm = self._scalar(0) if clips else None
        self.clip_factor = self._scalar(1) if clips else None
        self.unread = self._scalar(0)  # clip() finds inf and NaN again, as unscale() did
        self.zero, self.one, self.minus_one = self._scalar(0), self._scalar(1), self._scalar(-1)

    def _scalar(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=self.device)

    @property
    def engine(self) -> str:
        """``native``, and the number of kinds of products for which cublasLt has no algorithm: cuBLAS computed these
        products without fusion."""
        eager = self.loss.is_cuda and torch.ops.mpcompare.lt_unsupported_products()
        return f"native, {eager} eager" if eager else "native"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.mlp.rows_of(x, y)
        if self.casts:
            self.z[0].copy_(x)
        else:
            self.z[0] = x
        self.y = y
        self._forward()
        return self.loss

    def backward(self) -> None:
        da = self.dlogits  # da_L
        for layer in reversed(self.layers):
            z, W, dW = self.z[layer - 1], self.params[f"W{layer}"], self.scaled_grads[f"W{layer}"]
            if layer > 1:
                ops.linear_backward(da, W, z, dW, self.scaled_grads[f"b{layer - 1}"])  # z_{l-1} becomes da_{l-1}
                da = z
            else:
                ops.weight_grad(z, da, dW)

        self.micro_batches += 1
        if self.task.accumulate > 1:
            if self.micro_batches == 1:
                self.sums.zero_()
            # sums - (-1) grads: SGD's pass, for torch adds 16-bit numbers to fp32 ones by way of an fp32 copy
            torch.ops.mpcompare.sgd(self.sums, None, None, self.grads_of_one, self.minus_one, self.one, self.zero, None)

    def unscale(self) -> None:
        self.micro_batches = 0
        if self.clip_factor is not None:
            self.clip_factor.fill_(1)  # until clip() has it: grads() is valid from here on
        self.scaling.check(*(part.grad for part in self.parts))

    def clip(self) -> None:
        if self.grad_norm is None or self.clip_factor is None or self.task.clip_norm is None:
            return
        largest = self.task.clip_norm_type == math.inf
        self.norm.zero_()
        for part in self.parts:
            torch.ops.mpcompare.grad_norm(part.grad, self.scaling.used_scale, self.unread, self.norm, infinity=largest)
        self.grad_norm.copy_(self.norm if largest else self.norm.sqrt())
        ops.clip_factor(self.norm, self.clip_factor, max_norm=self.task.clip_norm, infinity=largest)

    def step(self, lr: float | Tensor) -> None:
        self.lr.fill_(lr)
        self._update_masters()

    def _update_masters(self) -> None:
        scale, found_inf = self.scaling.used_scale, self.scaling.found_inf
        optimizer = self.optimizer
        if isinstance(optimizer, Sgd):
            for master, state, copies, grad in self.parts:
                velocity = state.get("momentum_buffer")
                torch.ops.mpcompare.sgd(
                    master, velocity, copies, grad, self.lr, scale, found_inf, self.clip_factor,
                    momentum=optimizer.momentum, nesterov=optimizer.nesterov, weight_decay=optimizer.weight_decay,
                )  # fmt: skip
        else:
            self.updates.add_(1).sub_(found_inf)  # a step that is skipped does not count
            for master, state, copies, grad in self.parts:
                torch.ops.mpcompare.adam(
                    master, state["exp_avg"], state["exp_avg_sq"], copies, grad, self.lr, self.updates, scale,
                    found_inf, self.clip_factor, beta1=optimizer.betas[0], beta2=optimizer.betas[1],
                    eps=optimizer.eps, weight_decay=optimizer.weight_decay, decoupled=isinstance(optimizer, AdamW),
                )  # fmt: skip
        if self.task.accumulate > 1 and self.flat_copies is not self.flat_masters:
            self.flat_copies.copy_(self.flat_masters)

    def update(self) -> None:
        self.scaling.update()

    def _replay(self, batches: Batches, lr: float | Tensor) -> Tensor:
        """The ``train_step()`` of a graph: copies batch and learning rate to where it reads them, and replays it."""
        for (z0, held), (x, y) in zip(self.inputs, batches, strict=True):
            z0.copy_(self.mlp.rows_of(x, y))
            held.copy_(y)
        self.lr.fill_(lr)
        self.graph()
        return self.loss if self.task.accumulate == 1 else self.mean_loss

    def _step(self) -> None:
        """Takes the step that the graph holds."""
        self.mean_loss.zero_()
        for z0, y in self.inputs:
            self.z[0], self.y = z0, y
            self._forward()
            self.backward()
            self.mean_loss.add_(self.loss, alpha=1 / self.task.accumulate)
        self.unscale()
        self.clip()
        self._update_masters()
        self.update()

    def _forward(self) -> None:
        last = len(self.layers)
        for layer, out in zip(self.layers, [*self.z[1:], self.logits], strict=True):
            ops.linear(self.z[layer - 1], self.params[f"W{layer}"], self.params[f"b{layer}"], out, relu=layer < last)
        scale = self.scaling.scale
        if self.task.accumulate > 1:
            scale = scale / self.task.accumulate  # the loss of a step is the mean over its micro-batches
        dbias = self.scaled_grads[f"b{last}"]
        self.loss_of(self.logits, self.y, self.dlogits, dbias, self.loss, scale)

    def master_params(self) -> Params:
        return self.mlp.named(self.masters)

    def buffers(self) -> Params:
        return {}

    def grads(self) -> Params:
        if self.task.accumulate > 1:
            scaled = flat.views(self.sums, self.mlp.sizes)
        else:
            da = self.z[1] if len(self.z) > 1 else self.dlogits
            W1 = self.params["W1"]
            dW1 = flat.matrix(len(W1), W1.shape[1], W1.dtype, W1.device)
            ops.weight_grad(self.z[0], da, dW1)  # again, with the same bits: step() may have overwritten it with W_1
            scaled = {**self.scaled_grads, "W1": dW1}
        inv_scale = self.scaling.used_scale.double().reciprocal().float()
        grads = {name: g.float() * inv_scale for name, g in scaled.items()}
        if self.clip_factor is not None:
            grads = {name: g * self.clip_factor for name, g in grads.items()}
        return self.mlp.named(grads)

    def loss_scale(self) -> Tensor:
        return self.scaling.scale

    @contextmanager
    def _watched_products(self) -> Iterator[Products]:
        forward, backward, products = self._forward, self.backward, Products(self.mlp.layers)

        def watched_forward() -> None:
            forward()
            outputs = [(z, True) for z in self.z[1:]] + [(self.logits, False)]
            for z, (output, rectified) in zip(self.z, outputs, strict=True):
                products.forward(z, output, rectified)

        def watched_backward() -> None:
            backward()
            for da in (self.dlogits, *reversed(self.z[1:])):  # z_l has become da_l
                products.backward(da)

        vars(self).update(_forward=watched_forward, backward=watched_backward)
        try:
            yield products
        finally:
            del self._forward, self.backward

    def dtypes(self) -> dict[str, str]:
        # Plain SGD has no state: it computes in the masters' dtype.
        optimizer = next((views["W1"] for views in self.remembered.values()), self.masters["W1"])
        observed = {
            "params": self.masters["W1"], "activations": self.logits, "loss": self.loss,
            "gradients": self.scaled_grads["W1"], "optimizer": optimizer,
        }  # fmt: skip
        return {name: dtype_name(tensor.dtype) for name, tensor in observed.items()}

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        take_step(self, [(x, y)] * self.task.accumulate, self.optimizer.lr)
        z = [*(z.dtype for z in self.z), self.logits.dtype]
        loss = {"input": z[-1], "output": self.loss.dtype}  # all between the two is inside one operator
        return layer_dtypes_of_mlp(self.mlp, self.masters, self.params, z, self.scaled_grads, loss)

    def state_dict(self) -> State:
        remembered = {kind: self.mlp.named(views) for kind, views in self.remembered.items()}
        if not isinstance(self.optimizer, Sgd):
            remembered["step"] = dict.fromkeys(self.master_params(), self.updates.cpu().clone())
        return {
            "params": self.master_params(),
            "buffers": {},
            "optimizer": remembered,
            "loss_scale": self.scaling.state(),
        }

    def load_state_dict(self, state: State) -> None:
        self._set_masters(self.mlp.by_hand(state["params"]))
        for kind, views in self.remembered.items():
            values = self.mlp.by_hand(state["optimizer"].get(kind, {}))  # none before the first update
            for name, view in views.items():
                view.copy_(values[name]) if name in values else view.zero_()
        self.updates.copy_(max(state["optimizer"].get("step", {}).values(), default=torch.zeros(())))
        self.scaling.load_state(state["loss_scale"])

    def _set_masters(self, params: Params) -> None:
        for name, master in self.masters.items():
            master.copy_(params[name])
            self.params[name].copy_(master)

    def workspaces(self) -> dict[str, int]:
        return ops.workspaces(self.loss.device.type)

    def memory_model(self) -> MemoryModel:
        return fused_peak(self.mlp, self.precision)
