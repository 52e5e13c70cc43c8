"""The task that every implementation solves: a multi-layer perceptron, its loss, and its seeded initial weights.

    z_0 = x        a_l = z_{l-1} W_l + b_l        z_l = relu(a_l)  for l < L        output = a_L

``W_l`` is ``[in, out]``, ``b_l`` is ``[out]``, ``x`` is ``[n, in]``. Parameters and gradients travel as one dictionary,
``{"W1": ..., "b1": ..., "W2": ..., "b2": ...}``, in that order.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompare.errors import InputError, check_choice, check_number, check_whole

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained: the shape, the loss and the optimizer, the same for every backend.

    Attributes:
        in_features, hidden, out_features: widths of the layers; ``hidden`` may have any length, also none.
        loss: ``cross_entropy`` (mean over the batch; targets are int64 classes) or ``mse`` (mean over all elements).
        batch_size: rows of a batch. Only whole batches are used.
        samples: training samples to make where the data set is generated; real data sets have their own number.
        lr, momentum: plain SGD, ``v = momentum v + g; w = w - lr v``.
    """

    in_features: int
    hidden: Sequence[int]
    out_features: int
    loss: str
    batch_size: int
    samples: int
    lr: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features", "batch_size", "samples"):
            check_whole(f"task.{name}", getattr(self, name), at_least=1)
        if isinstance(self.hidden, str) or not isinstance(self.hidden, Sequence):
            raise InputError("task.hidden", self.hidden, "expected a list of widths, as in [1024,512]")
        for width in self.hidden:
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise InputError("task.hidden", list(self.hidden), "expected whole numbers of at least 1")
        object.__setattr__(self, "hidden", tuple(self.hidden))
        check_choice("task.loss", self.loss, ("cross_entropy", "mse"))
        check_number("task.lr", self.lr, above=0)
        if self.momentum != 0:
            check_number("task.momentum", self.momentum, above=0, below=1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Widths of all layers, input and output included."""
        return (self.in_features, *self.hidden, self.out_features)

    @property
    def flops_per_step(self) -> int:
        """Floating point operations of a step's matrix products: a product of M x K by K x N is 2 M N K.

        Every layer has a forward product and a weight gradient; every layer but the first an input gradient too.
        """
        products = [fan_in * fan_out for fan_in, fan_out in pairwise(self.sizes)]
        return 2 * self.batch_size * (3 * sum(products) - products[0])


def init_params(sizes: Sequence[int], seed: int) -> Params:
    """Initial weights, fp32 on the CPU: W and b from U(-1/sqrt(fan_in), +1/sqrt(fan_in)), as ``nn.Linear`` draws them.

    Drawn on the CPU whatever the device, so that every backend on every device starts from the same bits.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    params = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        bound = 1 / math.sqrt(fan_in)
        for name, shape in ((f"W{layer}", (fan_in, fan_out)), (f"b{layer}", (fan_out,))):
            params[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return params


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """First 16 hex digits of the SHA-256 over names, shapes, dtypes and bytes: equal means bit for bit equal."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]


def activations(params: Params, x: Tensor) -> list[Tensor]:
    """``z_1 ... z_{L-1}``, then the output, ``[n, width]`` each, in the dtype of ``params``: plain torch."""
    layers, z = len(params) // 2, []
    for layer in range(1, layers + 1):
        x = x @ params[f"W{layer}"] + params[f"b{layer}"]
        x = x.relu() if layer < layers else x
        z.append(x)
    return z


def forward(params: Params, x: Tensor) -> Tensor:
    """Output of the network, ``[n, out]``."""
    return activations(params, x)[-1]


def loss_fn(loss: str, output: Tensor, y: Tensor) -> Tensor:
    """The task's scalar loss: mean cross-entropy, or the mean squared error over all elements."""
    return F.cross_entropy(output, y) if loss == "cross_entropy" else F.mse_loss(output, y)


def oracle(
    params: Params,
    x: Tensor,
    y: Tensor,
    loss: str,
    see: Callable[[str, Tensor], None] | None = None,
    rows: int = 1024,
    dtype: torch.dtype = torch.float64,
) -> tuple[float, Params]:
    """Loss and gradients in float64 by autograd: what every backend is measured against.

    Args:
        params, x, y, loss: as of a training step.
        see: is shown the activations ``z1``, ``z2``, ..., ``output`` and their gradients ``dz1``, ..., ``doutput``:
            ``[rows, width]``.
        rows: of the batch at a time: the float64 activations of a large batch would not fit.
        dtype: fp32 where orders of magnitude are all that is asked for.
    """
    exact = {name: p.detach().to(dtype).requires_grad_() for name, p in params.items()}
    total, grads = 0.0, {name: torch.zeros_like(p) for name, p in exact.items()}
    for x_part, y_part in zip(x.split(rows), y.split(rows), strict=True):
        z = activations(exact, x_part.to(dtype))
        target = y_part.to(dtype) if y.is_floating_point() else y_part
        part = loss_fn(loss, z[-1], target) * (len(x_part) / len(x))  # the parts' mean, weighted by their rows
        total += part.item()
        found = torch.autograd.grad(part, [*exact.values(), *(z if see else [])])
        for total_grad, grad in zip(grads.values(), found, strict=False):
            total_grad += grad
        if see:
            names = [*(f"z{layer}" for layer in range(1, len(z))), "output"]
            for name, value, grad in zip(names, z, found[len(exact) :], strict=True):
                see(name, value.detach())
                see(f"d{name}", grad)
    return total, grads


def empty_targets(task: Task, device: torch.device) -> Tensor:
    """Room for a batch's targets: int64 classes ``[n]``, or fp32 ``[n, out]``."""
    if task.loss == "cross_entropy":
        return torch.empty(task.batch_size, dtype=torch.int64, device=device)
    return torch.empty(task.batch_size, task.out_features, device=device)


def to_module(params: Params) -> nn.Sequential:
    """The same network as torch users write it; ``nn.Linear`` stores the transpose, ``weight = W^T`` ``[out, in]``."""
    layers: list[nn.Module] = []
    for layer in range(1, len(params) // 2 + 1):
        W, b = params[f"W{layer}"], params[f"b{layer}"]
        fan_in, fan_out = W.shape
        linear = nn.Linear(fan_in, fan_out, device="meta").to_empty(device=W.device)
        with torch.no_grad():
            linear.weight.copy_(W.t())
            linear.bias.copy_(b)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def module_params(module: nn.Module) -> Params:
    """The parameters of :func:`to_module`'s network under their names here; ``W`` are views of ``weight``."""
    named = enumerate(module.parameters())
    return {f"{'bW'[i % 2 == 0]}{i // 2 + 1}": p.detach().t() if p.dim() == 2 else p.detach() for i, p in named}


def module_grads(module: nn.Module) -> Params:
    """The gradients of :func:`to_module`'s network under their names here."""
    params = module_params(module)
    grads = [p.grad for p in module.parameters()]
    return {name: g.t() if g.dim() == 2 else g for name, g in zip(params, grads, strict=True) if g is not None}
