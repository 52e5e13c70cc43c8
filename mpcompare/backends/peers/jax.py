"""JAX: Flax's ``nn.Dense(dtype=jnp.bfloat16)`` with fp32 parameters, Optax's optimizers, Flax's ``DynamicScale``.

https://flax.readthedocs.io/en/latest/api_reference/flax.training.html

    dynamic_scale, is_finite, loss, grads = dynamic_scale.value_and_grad(loss_fn)(params)
    params = jnp.where(is_finite, new_params, params)

``DynamicScale`` scales the loss in fp16, and grows one step later than GradScaler: after ``growth_interval`` good steps
the next good one doubles it.

Changed here: the step is finished before it returns (``block_until_ready``), since JAX computes in the background. The
gradients of micro-batches are means of equal parts, and the scale backs off if any of them overflows. Weights and
batches are copied between torch and JAX. The gradients are clipped by torch's formula: Optax's has no 1e-6 in it.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpcompare.backends.peers.library import library, transposed
from mpcompare.contract import BackendUnavailable, Batches, MemoryModel, ModuleDtypes, State
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale, require_one_of
from mpcompare.promises import Promises
from mpcompare.tasks.groups import refuse_groups
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.task import Params, Task

KINDS = {"trace": "momentum_buffer", "mu": "exp_avg", "nu": "exp_avg_sq"}  # Optax's names of what it keeps, and torch's


class JaxRow:
    """An MLP in Flax, trained by Optax."""

    PRECISIONS = ("fp16", "bf16")
    engine = "jax"

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        require_one_of((DynamicLossScale, NoLossScale), loss_scale, "Flax")
        if next(model.parameters()).device.type != "cpu":
            raise BackendUnavailable("backend=jax is for CPUs: its arrays are copied from and to torch")
        if task.clip_norm_type != 2:
            raise BackendUnavailable("backend=jax clips by the 2-norm only (task.clip_norm_type)")
        refuse_groups(task.optimizer, "backend=jax")
        self.jax: Any = library("jax", "jax")
        self.jnp: Any = library("jax.numpy", "jax")
        self.task, self.mlp = task, plain_mlp(model, task, "backend=jax")
        self.dtype = {"fp16": self.jnp.float16, "bf16": self.jnp.bfloat16}[precision]
        self.optax: Any = library("optax", "jax")
        self.transform = optimizer_of(self.optax, self.mlp.optimizer)
        self.params = self._from_torch({name: p.detach() for name, p in model.named_parameters()})
        self.kept = self.transform.init(self.params)
        self.scaling: Any = None
        if isinstance(loss_scale, DynamicLossScale):
            self.scaling = library("flax.training.dynamic_scale", "jax").DynamicScale(
                growth_factor=loss_scale.growth_factor,
                backoff_factor=loss_scale.backoff_factor,
                growth_interval=loss_scale.growth_interval,
                scale=self.jnp.float32(loss_scale.init_scale),
            )
            self.promises = Promises(loss_scale={"growth_interval": loss_scale.growth_interval + 1})
        self.micro_step = self.jax.jit(self._micro_step)
        self.apply = self.jax.jit(self._update)
        self.shown: dict[str, Any] = {}
        self.skipped = False
        self.grad_norm: float | None = None

    def network(self, params: dict[str, Any], x: Any) -> Any:
        """Returns the output of the layers, each as ``flax.linen.Dense`` computes it in ``dtype``."""
        dense = library("flax.linen", "jax").Dense
        for number, name in enumerate(self.mlp.layers):
            layer = dense(self.mlp.sizes[number + 1], dtype=self.dtype)
            x = layer.apply({"params": {"kernel": params[f"{name}.weight"], "bias": params[f"{name}.bias"]}}, x)
            x = self.jax.nn.relu(x) if number < len(self.mlp.layers) - 1 else x
        return x

    def _loss(self, x: Any, y: Any, params: dict[str, Any]) -> Any:
        output = self.network(params, x).astype(self.jnp.float32)
        if self.mlp.loss == "mse":
            return ((output - y) ** 2).mean()
        log_probs = self.jax.nn.log_softmax(output)
        return -self.jnp.take_along_axis(log_probs, y[:, None], axis=1).mean()

    def _micro_step(self, scaling: Any, params: Any, x: Any, y: Any) -> tuple[Any, Any, Any, Any]:
        """Returns the next scale, whether the gradients are finite, the loss, and the unscaled gradients."""
        loss_of = partial(self._loss, x, y)
        if scaling is None:
            loss, grads = self.jax.value_and_grad(loss_of)(params)
            return None, True, loss, grads
        result = scaling.value_and_grad(loss_of)(params)
        return result.dynamic_scale, result.finite, result.aux, result.grad

    def _update(self, finite: Any, params: Any, kept: Any, grads: Any, lr: Any) -> tuple[Any, Any, Any, Any]:
        """Returns the new parameters and what the optimizer keeps, or the old; the clipped gradients, and the norm."""
        tree = self.jax.tree_util
        norm = self.jnp.sqrt(sum((g * g).sum() for g in tree.tree_leaves(grads)))
        if self.task.clip_norm is not None:
            factor = self.jnp.minimum(1.0, self.task.clip_norm / (norm + 1e-6))
            grads = tree.tree_map(lambda g: g * factor, grads)
        changes, new_kept = self.transform.update(grads, kept, params)
        new_params = tree.tree_map(lambda p, change: p + lr * change, params, changes)
        new = tree.tree_map(partial(self.jnp.where, finite), (new_params, new_kept), (params, kept))
        return *new, grads, norm

    def train_step(self, batches: Batches, lr: float | Tensor) -> Tensor:
        grads, finite, total, scalings = None, True, 0.0, []
        for x, y in batches:
            rows = self.mlp.rows_of(x, y)
            scaling, good, loss, each = self.micro_step(self.scaling, self.params, _array(rows), _array(y))
            scalings.append((scaling, good))
            share = self.jax.tree_util.tree_map(lambda g: g / len(batches), each)
            grads = share if grads is None else self.jax.tree_util.tree_map(lambda a, b: a + b, grads, share)
            finite, total = finite & good, total + loss / len(batches)
        finished = self.apply(finite, self.params, self.kept, grads, np.float32(float(lr)))
        self.params, self.kept, self.shown, norm = self.jax.block_until_ready(finished)
        self.skipped = not bool(finite)
        self.scaling = next((scaling for scaling, good in scalings if not bool(good)), scalings[-1][0])
        self.grad_norm = None if self.task.clip_norm is None else float(norm)
        return torch.tensor(float(total))

    # The harness asks for the following outside of the step. Flax's kernels are torch's weights, transposed.

    def _from_torch(self, tensors: Params) -> dict[str, Any]:
        return {name: self.jnp.array(_array(transposed(name, t))) for name, t in tensors.items()}

    def _to_torch(self, arrays: dict[str, Any]) -> Params:
        return {name: transposed(name, torch.from_numpy(np.array(a))) for name, a in arrays.items()}

    def master_params(self) -> Params:
        return self._to_torch(self.params)

    def buffers(self) -> Params:
        return {}

    def grads(self) -> Params:
        return self._to_torch(self.shown)

    def loss_scale(self) -> float:
        return 1.0 if self.scaling is None else float(self.scaling.scale)

    def dtypes(self) -> dict[str, str]:
        name = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
        first = self.params[f"{self.mlp.layers[0]}.weight"]
        x = self.jnp.zeros((1, self.mlp.sizes[0]))
        y = self.jnp.zeros((1, self.mlp.sizes[-1])) if self.mlp.loss == "mse" else self.jnp.zeros(1, self.jnp.int32)
        moments = [next(iter(arrays.values())) for arrays in self._moments().values()]
        observed = {
            "params": first,
            "activations": self.jax.eval_shape(self.network, self.params, x),
            "gradients": next(iter(self.shown.values())),
            "loss": self.jax.eval_shape(self._loss, x, y, self.params),
            "optimizer": (moments or [first])[0],
        }
        return {what: name[str(array.dtype)] for what, array in observed.items()}

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        return {}  # torch's hooks see nothing of JAX

    def _moments(self) -> dict[str, dict[str, Any]]:
        """Returns what Optax keeps of each parameter, by torch's names."""
        kept = {kind: self.optax.tree.get(self.kept, field) for field, kind in KINDS.items()}
        return {kind: arrays for kind, arrays in kept.items() if arrays is not None}

    def state_dict(self) -> State:
        moments = {kind: self._to_torch(arrays) for kind, arrays in self._moments().items()}
        if (count := self.optax.tree.get(self.kept, "count")) is not None:
            moments["step"] = {name: torch.tensor(float(count)) for name in self.params}
        scale: dict[str, float] = {}
        if self.scaling is not None:
            scale = {"scale": self.loss_scale(), "growth_tracker": int(self.scaling.fin_steps)}
        return {"params": self.master_params(), "buffers": {}, "optimizer": moments, "loss_scale": scale}

    def load_state_dict(self, state: State) -> None:
        self.params = self._from_torch(state["params"])
        own, given = self._moments(), state["optimizer"]
        fields = {f: self._from_torch(given[kind]) for f, kind in KINDS.items() if kind in own and kind in given}
        if "exp_avg" in own and "step" in given:
            fields["count"] = self.jnp.array(int(next(iter(given["step"].values()))), self.jnp.int32)
        self.kept = self.optax.tree.set(self.kept, **fields)
        if self.scaling is not None and "scale" in state["loss_scale"]:
            scale, count = state["loss_scale"]["scale"], int(state["loss_scale"].get("growth_tracker", 0))
            self.scaling = self.scaling.replace(scale=self.jnp.float32(scale), fin_steps=count)

    def memory_model(self) -> MemoryModel:
        return {}


def optimizer_of(optax: Any, asked: Sgd | Adam | AdamW) -> Any:
    """Returns Optax's transformation for a learning rate of 1. A step multiplies its changes by the schedule's rate."""
    if isinstance(asked, Sgd):
        if asked.weight_decay:
            raise BackendUnavailable("backend=jax: optax.sgd has no weight decay")
        return optax.sgd(1.0, asked.momentum or None, asked.nesterov)
    if isinstance(asked, AdamW):
        return optax.adamw(1.0, *asked.betas, asked.eps, weight_decay=asked.weight_decay)
    if asked.weight_decay:
        raise BackendUnavailable("backend=jax: optax.adam has no weight decay")
    return optax.adam(1.0, *asked.betas, asked.eps)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()
