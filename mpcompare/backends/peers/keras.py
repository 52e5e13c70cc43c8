"""Keras 3 on torch: dense layers whose ``dtype`` is the policy ``mixed_float16``, an optimizer that scales.

https://keras.io/api/mixed_precision/

The MLP is built of Keras's ``Dense`` layers: fp32 variables, which each layer casts. ``compile`` wraps the optimizer of
a ``mixed_float16`` model into a ``LossScaleOptimizer`` with its defaults, whatever was asked for: a scale of 2^15 that
doubles after 2000 good steps, halves on an overflow, and has no minimum. Unscaling, the step and the scale's update are
one ``apply``; the gradients are divided by the scale beforehand, too, so that they can be looked at.

Changed here: ``fit`` is taken apart as in Keras's guide to torch loops, so that the task's loss, clipping and
micro-batches are used: the clipped gradients are multiplied by the scale again, by which ``apply`` divides them; the
scale is a power of two. The optimizer's formulas are Keras's, with the task's settings.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.layer_dtypes.modules import layer_dtypes_of_step
from mpcompare.backends.peers.library import library, transposed
from mpcompare.backends.torch_model import clip_gradients, copy_into, require_kernels, share_of_step
from mpcompare.contract import BackendUnavailable, MemoryModel, ModuleDtypes, State
from mpcompare.dtypes import dtype_name
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale, require_one_of
from mpcompare.operands import Products
from mpcompare.promises import Promises
from mpcompare.tasks.groups import refuse_groups
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.task import Params, Task

POLICIES = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16"}
OWN_SCALE = {"init_scale": 2.0**15, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


class KerasRow:
    """Keras's layers and optimizer on torch."""

    PRECISIONS = ("fp16", "bf16")
    IDLE_PHASES: tuple[str, ...] = ()
    engine = "torch"

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        require_one_of((DynamicLossScale, NoLossScale), loss_scale, "Keras")
        refuse_groups(task.optimizer, "backend=keras")
        os.environ["KERAS_BACKEND"] = "torch"
        self.keras: Any = library("keras", "keras")
        if self.keras.backend.backend() != "torch":
            other = self.keras.backend.backend()
            raise BackendUnavailable(f"backend=keras needs Keras on torch, and it runs on {other}")
        self.task, self.device = task, next(model.parameters()).device
        require_kernels(model, self.device.type, precision, "keras")
        self.mlp = plain_mlp(model, task, "backend=keras")
        layers = self._layers(POLICIES[precision])
        names = [name.replace(".", "/") for name in self.mlp.layers]  # torch takes no dots
        self.network = nn.Sequential(OrderedDict(zip(names, map(CalledLayer, layers), strict=True)))
        self.variables = {
            f"{name}.{part}": variable
            for name, layer in zip(self.mlp.layers, layers, strict=True)
            for part, variable in (("weight", layer.kernel), ("bias", layer.bias))
        }
        copy_into(self.master_params(), {name: p.detach() for name, p in model.named_parameters()})
        self.inner = optimizer_of(self.keras, self.mlp.optimizer)
        self.scales = loss_scale.scales
        self.optimizer = self.keras.optimizers.LossScaleOptimizer(self.inner) if self.scales else self.inner
        self.optimizer.build(list(self.variables.values()))
        if self.scales:
            self.promises = Promises(loss_scale=OWN_SCALE)
        self.skipped = False
        self.grad_norm: Tensor | None = None
        self.observed: dict[str, torch.dtype] = {}

    def _layers(self, policy: str) -> list[Any]:
        dense = partial(self.keras.layers.Dense, dtype=policy)
        hidden = [dense(units, activation="relu") for units in self.mlp.sizes[1:-1]]
        layers = [*hidden, dense(self.mlp.out_features)]
        for layer, width in zip(layers, self.mlp.sizes, strict=False):
            layer.build((None, width))
        return layers

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.network(self.mlp.rows_of(x, y))
        self.loss = self.task.loss_fn(output.float(), y)
        self.observed.update(activations=output.dtype, loss=self.loss.dtype)
        return self.loss.detach()

    def backward(self) -> None:
        loss = share_of_step(self.task, self.loss)
        (self.optimizer.scale_loss(loss) if self.scales else loss).backward()
        self.observed["gradients"] = next(iter(self.grads().values())).dtype

    def unscale(self) -> None:
        if self.scales:
            for g in self.grads().values():
                g.div_(self.loss_scale())

    def clip(self) -> None:
        self.grad_norm = clip_gradients(self.task, self.values().values())

    def step(self, lr: float | Tensor) -> None:
        self.inner.learning_rate = float(lr)
        grads = [p.grad for p in self.values().values() if p.grad is not None]
        if self.scales:  # ``apply`` divides them by it
            grads = [g * self.loss_scale() for g in grads]
        before = int(self.inner.iterations)
        with torch.no_grad():
            self.optimizer.apply(grads, list(self.variables.values()))
        self.skipped = int(self.inner.iterations) == before

    def update(self) -> None:
        for p in self.values().values():  # ``apply`` has set the next scale
            p.grad = None

    def loss_scale(self) -> float:
        return float(self.optimizer.dynamic_scale) if self.scales else 1.0

    @contextmanager
    def watched_products(self) -> Iterator[Products]:
        products, last = Products(self.mlp.layers), len(self.mlp.layers) - 1

        def note(number: int, _: nn.Module, inputs: tuple[Tensor], z: Tensor) -> None:
            rectified = number < last  # a Dense of a hidden layer is product, bias and relu
            products.forward(inputs[0].detach(), z.detach(), rectified)
            z.register_hook(lambda dz: products.backward(dz.where(z > 0, 0) if rectified else dz))

        with ExitStack() as hooks:
            for number, layer in enumerate(self.network.children()):
                hooks.enter_context(layer.register_forward_hook(partial(note, number)))
            yield products

    # The harness asks for the following outside of the step. Keras's kernels are torch's weights, transposed.

    def values(self) -> dict[str, nn.Parameter]:
        """Returns the torch parameters in Keras's variables."""
        return {name: variable.value for name, variable in self.variables.items()}

    def master_params(self) -> Params:
        return {name: transposed(name, p.detach()) for name, p in self.values().items()}

    def buffers(self) -> Params:
        return {}

    def grads(self) -> Params:
        return {name: transposed(name, p.grad) for name, p in self.values().items() if p.grad is not None}

    def dtypes(self) -> dict[str, str]:
        values = next(iter(self.values().values()))
        kept = [tensor for tensors in self._moments().values() for tensor in tensors.values()]
        dtypes = {"params": values.dtype, **self.observed, "optimizer": (kept or [values])[0].dtype}
        return {name: dtype_name(dtype) for name, dtype in dtypes.items()}

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        seen = layer_dtypes_of_step(self, self.network, {}, [(x, y)])
        return {name.replace("/", "."): row for name, row in seen.items()}

    def _moments(self) -> dict[str, Params]:
        """Returns Keras's tensors by kind and name. SGD's momentum is times the learning rate, and has
        a name of its own."""
        ends = {"momentum": "exp_avg", "velocity": "exp_avg_sq"}
        if isinstance(self.task.optimizer, Sgd):
            ends = {"momentum": "keras_momentum"}
        moments = {}
        for end, kind in ends.items():
            kept = [variable.value.detach() for variable in self.inner.variables if variable.path.endswith(f"_{end}")]
            if kept:
                moments[kind] = {
                    name: transposed(name, tensor) for name, tensor in zip(self.variables, kept, strict=True)
                }
        return moments

    def state_dict(self) -> State:
        moments = self._moments()
        if "exp_avg" in moments:
            count = torch.tensor(float(self.inner.iterations))
            moments["step"] = dict.fromkeys(self.variables, count)
        scale = (
            {"scale": self.loss_scale(), "growth_tracker": float(self.optimizer.step_counter)} if self.scales else {}
        )
        return {"params": self.master_params(), "buffers": {}, "optimizer": moments, "loss_scale": scale}

    def load_state_dict(self, state: State) -> None:
        kept = dict(state["optimizer"])
        if isinstance(self.task.optimizer, Sgd) and "momentum_buffer" in kept:  # the state comes from another backend
            lr = self.task.optimizer.lr
            kept["keras_momentum"] = {name: -lr * v for name, v in kept["momentum_buffer"].items()}
        copy_into(self.master_params(), state["params"])
        for kind, tensors in self._moments().items():
            copy_into({name: t for name, t in tensors.items() if name in kept.get(kind, {})}, kept.get(kind, {}))
        for count in kept.get("step", {}).values():
            self.inner.iterations.assign(int(count))
        if self.scales and "scale" in state["loss_scale"]:
            self.optimizer.dynamic_scale.assign(state["loss_scale"]["scale"])
            self.optimizer.step_counter.assign(int(state["loss_scale"].get("growth_tracker", 0)))

    def memory_model(self) -> MemoryModel:
        return {}


class CalledLayer(nn.Module):
    """A layer of Keras in a module of torch, whose hooks Keras does not call."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = [layer]  # in a list torch does not see its parameters

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer[0](x)
        return output


def optimizer_of(keras: Any, asked: Sgd | Adam | AdamW) -> Any:
    """Returns Keras's optimizer with the settings of the task's."""
    if isinstance(asked, Sgd):
        if asked.weight_decay:
            raise BackendUnavailable("backend=keras: Keras's SGD decays weights as AdamW does, and not in the gradient")
        return keras.optimizers.SGD(asked.lr, momentum=asked.momentum, nesterov=asked.nesterov)
    settings = {"beta_1": asked.betas[0], "beta_2": asked.betas[1], "epsilon": asked.eps}
    if isinstance(asked, AdamW):
        return keras.optimizers.AdamW(asked.lr, weight_decay=asked.weight_decay, **settings)
    if asked.weight_decay:
        raise BackendUnavailable("backend=keras: Keras's Adam has no weight decay in the gradient")
    return keras.optimizers.Adam(asked.lr, **settings)
