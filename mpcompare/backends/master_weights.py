"""Mixed precision as it was done before autocast, by hand and for any module: a 16-bit network and fp32 masters.

The recipe of Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), and of NVIDIA's apex at level O2:

    the module is cast to 16 bits         its layers compute in the dtype of their weights: nothing is cast on the way
    norms and embeddings stay in fp32     both sum many numbers: a norm the statistics of its inputs, an embedding the
                                          gradients of each token
    the optimizer updates fp32 masters    and each step ends with a copy of the masters into the 16-bit weights
    the loss is scaled by hand            and its gradients are unscaled in fp32; no autocast, no GradScaler

Beside ``amp`` this costs a 16-bit copy of the weights that is always live, saves the casts of every forward, and keeps
residual streams in 16 bits that autocast promotes to fp32.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.torch_model import observed_dtypes, require_kernels
from mpcompare.backends.watch.modules import watch
from mpcompare.contract import MemoryModel, ModuleDtypes, take_step
from mpcompare.loss_scale import LossScale
from mpcompare.precision import DTYPES
from mpcompare.tasks.task import Params, Task, buffers_of

STAY_IN_FP32 = (
    nn.modules.batchnorm._NormBase,  # batch and instance norms
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.Embedding,
    nn.EmbeddingBag,
)


def cast_module(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters and floating buffers to ``dtype`` in place, but those of ``STAY_IN_FP32``, whose inputs are cast
    to fp32 and whose outputs to ``dtype``. Tied parameters stay tied."""

    def to_fp32(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)

    def to_16_bits(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.to(dtype)

    owners = [(id(p), isinstance(m, STAY_IN_FP32)) for m in model.modules() for p in m.parameters(recurse=False)]
    # A weight that is tied to an embedding's is an operand of a product too, which needs it in 16 bits.
    kept = {p for p, stays in owners if stays} - {p for p, stays in owners if not stays}
    for module in model.modules():
        if isinstance(module, STAY_IN_FP32):
            module.register_forward_pre_hook(to_fp32)
            module.register_forward_hook(to_16_bits)
            continue
        for p in module.parameters(recurse=False):
            if id(p) not in kept:
                p.data = p.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants its weights in one piece


class MasterWeights:
    """A 16-bit module, fp32 masters, loss scaling by hand."""

    PRECISIONS = ("fp16", "bf16")
    IDLE_PHASES: tuple[str, ...] = ()
    engine = "torch"

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        require_kernels(model, next(model.parameters()).device.type, precision, "master_weights")
        self.loss_fn, self.scaling, self.compute_dtype = task.loss_fn, loss_scale, DTYPES[precision]
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        self.model = copy.deepcopy(model)
        cast_module(self.model, self.compute_dtype)
        self.params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = task.optimizer.make(self.masters[name] for name in self.params)
        self.skipped = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.model(x.to(self.compute_dtype) if x.is_floating_point() else x)
        self.loss = self.loss_fn(output.float(), y)  # softmax and loss in fp32
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()

    def backward(self) -> None:
        (self.loss * self.scaling.scale).backward()

    def unscale(self) -> None:
        scaled = {name: p.grad for name, p in self.params.items() if p.grad is not None}
        self.observed["gradients"] = min((g.dtype for g in scaled.values()), key=lambda dtype: dtype.itemsize)
        self.found_inf = self.scaling.found_inf(scaled.values())
        for name, g in scaled.items():
            self.masters[name].grad = g.float() * self.scaling.inv_scale
            self.params[name].grad = None

    def step(self) -> None:
        self.skipped = self.found_inf
        if self.skipped:
            return
        self.optimizer.step()
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(self.masters[name])

    def update(self) -> None:
        self.scaling.update(self.found_inf)
        self.optimizer.zero_grad(set_to_none=True)

    # What the harness asks, outside the step.

    def master_params(self) -> Params:
        return {name: master.detach() for name, master in self.masters.items()}

    def buffers(self) -> Params:
        return buffers_of(self.model)

    def grads(self) -> Params:
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def loss_scale(self) -> float:
        return self.scaling.scale

    def dtypes(self) -> dict[str, str]:
        # params are what the optimizer updates
        masters = nn.ParameterDict({name.replace(".", "/"): p for name, p in self.masters.items()})
        return observed_dtypes(masters, self.optimizer, self.observed)

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        return watch(self.model, self.masters, lambda: take_step(self, x, y))

    def state_dict(self) -> dict[str, Any]:
        return {
            "masters": self.masters,
            "buffers": buffers_of(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scaling": dict(vars(self.scaling)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(state["masters"][name])
            for name, p in self.model.named_parameters():
                p.copy_(self.masters[name])
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state["buffers"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        vars(self.scaling).update(state["scaling"])

    def memory_model(self) -> MemoryModel:
        return {}
