"""The mathematics of ``scratch``, step for step, in as few passes over memory and as few launches as possible.

Read ``scratch`` first. What differs is where the work happens:

    bias and relu                  in the store of the forward product
    softmax, loss, its gradient    one pass over the logits, in forward()
    relu's mask, bias gradient     with the product that makes dz; dz_l overwrites z_l
    search for inf and NaN         one pass over the 16-bit gradients, in unscale()
    unscale, SGD, 16-bit copies    one pass over the parameters, in step(); the copies are ready for the next forward()

The search stays a pass of its own, and SGD out of the product that makes dW: a gradient overflows where it is rounded
to 16 bits, as torch.amp's does, and no weight may change before every gradient is known to be finite.

Whether to skip, and the next loss scale, are decided on the device: Python never waits. On a GPU the whole step is one
CUDA graph. All buffers are made once, the parameters' as flat.py says. dW_1 lies where the 16-bit W_1 was, which the
step is done with by then; step() makes W_1 anew.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.watch.modules import mlp_dtypes
from mpcompare.contract import BackendUnavailable, MemoryModel, ModuleDtypes, take_step
from mpcompare.cost import memory
from mpcompare.errors import InputError
from mpcompare.loss_scale import LossScale
from mpcompare.native import flat, ops
from mpcompare.native.build import BuildError
from mpcompare.native.device_scale import DeviceLossScale
from mpcompare.native.graph import StepGraph, require_cuda
from mpcompare.precision import DTYPES, dtype_name
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.tasks.task import Params, Task


class Fused:
    """Manual mixed precision with fused native operators; the same contract and the same rules as ``scratch``.

    ``graph``: whether the whole step is one CUDA graph; ``auto``: on a GPU. It is taken by ``train_step()`` then, which
    there is in no other case.
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
        self.mlp = plain_mlp(model, task, "backend=fused")
        params, self.precision = self.mlp.by_hand(dict(model.named_parameters())), precision
        device, dtype, n, sizes = params["W1"].device, DTYPES[precision], task.batch_size, self.mlp.sizes
        if engine == "torch":
            raise InputError("engine", engine, "backend=fused accepts one of auto, native")
        if graph != "auto" and not isinstance(graph, bool):
            raise InputError("backend.graph", graph, "expected one of auto, true, false")
        if graph is True:
            require_cuda(device, "backend.graph=true")
        try:
            ops.load(device.type)
        except BuildError as error:
            raise BackendUnavailable(f"backend=fused needs the native operators: {error}") from error
        graphed = device.type == "cuda" if graph == "auto" else graph is True
        if graphed:
            self.graph = StepGraph(self._step)
            self.train_step = self._replay
        self.loss_of = ops.cross_entropy if self.mlp.loss == "cross_entropy" else ops.mse
        self.lr, self.momentum = torch.tensor(self.mlp.lr, device=device), self.mlp.momentum
        self.layers = range(1, len(sizes))  # 1 .. L
        self.scaling = DeviceLossScale(loss_scale, device)
        self.skipped = self.scaling.found_inf

        def buffer(dtype: torch.dtype, begin: int = 0) -> Tensor:
            return torch.zeros(flat.elements(sizes) - begin, dtype=dtype, device=device)

        masters, velocity = buffer(torch.float32), buffer(torch.float32) if self.momentum else None
        # (masters, velocity, 16-bit copies, gradients) that belong together, element by element.
        self.parts: list[tuple[Tensor, Tensor | None, Tensor | None, Tensor]]
        if dtype is torch.float32:
            copies, grads = masters, buffer(dtype)
            self.scaled_grads = flat.views(grads, sizes)
            self.parts = [(masters, velocity, None, grads)]
        else:
            W1 = flat.sections(sizes)["W1"][1]
            copies, grads = buffer(dtype), buffer(dtype, W1)
            self.scaled_grads = {"W1": flat.views(copies, sizes)["W1"], **flat.views(grads, sizes, W1)}
            v1, v = (None, None) if velocity is None else (velocity[:W1], velocity[W1:])
            self.parts = [(masters[:W1], v1, copies[:W1], copies[:W1]), (masters[W1:], v, copies[W1:], grads)]
        self.masters, self.params = flat.views(masters, sizes), flat.views(copies, sizes)
        self.velocity = {} if velocity is None else flat.views(velocity, sizes)
        self._set_masters(params)

        # The batch lies where it is given, unless it is cast or a graph reads it, always from the same place.
        self.casts = dtype is not torch.float32 or graphed
        z0 = flat.matrix(n if self.casts else 0, sizes[0], dtype, device)
        self.z = [z0, *(flat.matrix(n, width, dtype, device) for width in sizes[1:-1])]  # z_0 .. z_{L-1}
        self.logits, self.dlogits = (flat.matrix(n, sizes[-1], dtype, device) for _ in range(2))
        self.y = self.mlp.empty_targets(device) if graphed else torch.empty(0)
        self.loss = torch.zeros((), device=device)

    @property
    def engine(self) -> str:
        """Says so where products had no fused path: cublasLt has no algorithm for them, so cuBLAS did them."""
        eager = self.loss.is_cuda and ops.unsupported_products()
        return f"native, {eager} eager" if eager else "native"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self._take_inputs(x)
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

    def unscale(self) -> None:
        self.scaling.check(*(grad for *_, grad in self.parts))

    def step(self) -> None:
        scale, found_inf = self.scaling.scale, self.scaling.found_inf
        for master, velocity, params, grad in self.parts:
            ops.sgd(master, velocity, params, grad, self.lr, scale, found_inf, momentum=self.momentum)

    def update(self) -> None:
        self.scaling.update()

    def _replay(self, x: Tensor, y: Tensor) -> Tensor:
        """``train_step()``: the batch goes where the graph reads it, and the graph does the rest."""
        self._take_inputs(x)
        self.y.copy_(y)
        self.graph()
        return self.loss

    def _step(self) -> None:
        """What the graph holds."""
        self._forward()
        self.backward()
        self.unscale()
        self.step()
        self.update()

    def _take_inputs(self, x: Tensor) -> None:
        x = x.flatten(1)
        if self.casts:
            self.z[0].copy_(x)
        else:
            self.z[0] = x

    def _forward(self) -> None:
        last = len(self.layers)
        for layer, out in zip(self.layers, [*self.z[1:], self.logits], strict=True):
            ops.linear(self.z[layer - 1], self.params[f"W{layer}"], self.params[f"b{layer}"], out, relu=layer < last)
        dbias = self.scaled_grads[f"b{last}"]
        self.loss_of(self.logits, self.y, self.dlogits, dbias, self.loss, self.scaling.scale)

    def master_params(self) -> Params:
        return self.mlp.named(self.masters)

    def buffers(self) -> Params:
        return {}

    def grads(self) -> Params:
        da = self.z[1] if len(self.z) > 1 else self.dlogits
        W1 = self.params["W1"]
        dW1 = flat.matrix(len(W1), W1.shape[1], W1.dtype, W1.device)
        ops.weight_grad(self.z[0], da, dW1)  # once more, the same bits: step() may have made W_1 of it
        inv_scale = self.scaling.used_scale.double().reciprocal().float()
        grads = {name: g.float() * inv_scale for name, g in {**self.scaled_grads, "W1": dW1}.items()}
        return self.mlp.named(grads)

    def loss_scale(self) -> Tensor:
        return self.scaling.scale

    def dtypes(self) -> dict[str, str]:
        optimizer = self.velocity.get("W1", self.masters["W1"])  # plain SGD has no state: it computes in the masters'
        observed = {
            "params": self.masters["W1"], "activations": self.logits, "loss": self.loss,
            "gradients": self.scaled_grads["W1"], "optimizer": optimizer,
        }  # fmt: skip
        return {name: dtype_name(tensor.dtype) for name, tensor in observed.items()}

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        take_step(self, x, y)
        z = [*(z.dtype for z in self.z), self.logits.dtype]
        loss = {"input": z[-1], "output": self.loss.dtype}  # what lies between them is inside of one operator
        return mlp_dtypes(self.mlp, self.masters, self.params, z, self.scaled_grads, loss)

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.masters, "velocity": self.velocity, "scaling": self.scaling.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._set_masters(state["masters"])
        for mine, theirs in ((self.velocity, state["velocity"]), (self.scaling.state(), state["scaling"])):
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])

    def _set_masters(self, params: Params) -> None:
        for name, master in self.masters.items():
            master.copy_(params[name])
            self.params[name].copy_(master)

    def memory_model(self) -> MemoryModel:
        return memory.fused_peak(self.mlp, self.precision)
