"""The multi-layer perceptron, as a torch module and as the backends see it that compute it by hand.

    z_0 = x        a_l = z_{l-1} W_l + b_l        z_l = relu(a_l)  for l < L        output = a_L

``nn.Linear`` stores ``weight = W^T`` ``[out, in]``. By hand ``W_l`` is ``[in, out]``, ``b_l`` is ``[out]`` and the
parameters are ``{"W1": ..., "b1": ..., "W2": ..., "b2": ...}``.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from mpcompare.errors import BackendUnavailable, InputError, check_whole
from mpcompare.tasks.copies import HOOKS
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd, require_known
from mpcompare.tasks.task import Params, Task


class Mlp(nn.Sequential):
    """``flatten, layer1, relu1, layer2, relu2, ..., layerL``: ``[n, ...]`` to ``[n, out_features]``.

    W and b are drawn from U(-1/sqrt(fan_in), +1/sqrt(fan_in)), as ``nn.Linear`` does, ``W`` ``[in, out]`` row by row.
    ``hidden`` has the widths of the layers between input and output, of which there may be none.
    """

    def __init__(self, in_features: int, hidden: Sequence[int], out_features: int) -> None:
        check_whole("task.model.in_features", in_features, at_least=1)
        check_whole("task.model.out_features", out_features, at_least=1)
        if isinstance(hidden, str) or not isinstance(hidden, Sequence):
            raise InputError("task.model.hidden", hidden, "expected a list of widths, as in [1024,512]")
        for width in hidden:
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise InputError("task.model.hidden", list(hidden), "expected whole numbers of at least 1")
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for layer, (fan_in, fan_out) in enumerate(pairwise((in_features, *hidden, out_features)), start=1):
            linear = nn.Linear(fan_in, fan_out, device="meta").to_empty(device="cpu")
            bound = 1 / math.sqrt(fan_in)
            with torch.no_grad():
                linear.weight.copy_(torch.empty(fan_in, fan_out).uniform_(-bound, bound).t())
                linear.bias.uniform_(-bound, bound)
            layers[f"layer{layer}"] = linear
            layers[f"relu{layer}"] = nn.ReLU()
        layers.popitem()  # the output has no relu
        super().__init__(layers)


@dataclass(frozen=True)
class PlainMlp:
    """A task that can be computed by hand: an MLP, cross-entropy or MSE, SGD, Adam or AdamW."""

    layers: tuple[str, ...]  # names of the linear layers in the module, first to last
    sizes: tuple[int, ...]  # widths of all layers, input and output included
    flattens: bool  # whether a Flatten stands before the first layer
    loss: str  # ``cross_entropy`` (targets are int64 classes ``[n]``) or ``mse`` (fp32 ``[n, out]``)
    rows: int  # the samples of a micro-batch, which forward and backward see at once
    accumulate: int  # as in the task
    optimizer: Sgd | Adam | AdamW  # as in the task

    @property
    def in_features(self) -> int:
        return self.sizes[0]

    @property
    def out_features(self) -> int:
        return self.sizes[-1]

    def by_hand(self, named: Mapping[str, Tensor]) -> Params:
        """Returns ``layer1.weight, layer1.bias, ...`` as ``W1`` (a view, transposed), ``b1``, ...; leaves out the names
        that are not in ``named``."""
        given = {key: named[name].detach() for key, name in self.names.items() if name in named}
        return {key: tensor.t() if key[0] == "W" else tensor for key, tensor in given.items()}

    def named(self, by_hand: Mapping[str, Tensor]) -> Params:
        """Returns ``W1, b1, ...`` as ``layer1.weight`` (a view, transposed), ``layer1.bias``, ...: the inverse of
        :meth:`by_hand`."""
        given = {key: by_hand[key] for key in self.names if key in by_hand}
        return {self.names[key]: tensor.t() if key[0] == "W" else tensor for key, tensor in given.items()}

    @cached_property
    def names(self) -> dict[str, str]:
        """The names in the module, such as ``layer1.weight``, by ``W1``, ``b1``, ..."""
        layers = enumerate(self.layers, start=1)
        parts = (("W", "weight"), ("b", "bias"))
        return {f"{key}{number}": f"{name}.{part}" for number, name in layers for key, part in parts}

    def rows_of(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns inputs as the rows ``[n, in]`` of the first layer. Raises BackendUnavailable where inputs or targets
        have other shapes than an MLP's."""
        targets = (len(x),) if self.loss == "cross_entropy" else (len(x), self.out_features)
        if (x.dim() != 2 and not self.flattens) or y.shape != targets:
            given = f"inputs of shape {list(x.shape)} and targets of shape {list(y.shape)}"
            expected = f"expected [n, {self.in_features}] (or a Flatten before the first layer) and {list(targets)}"
            raise BackendUnavailable(f"an MLP by hand is given {given}: {expected}")
        return x.flatten(1)

    def empty_targets(self, device: torch.device) -> Tensor:
        """Returns room for the targets of a micro-batch: int64 classes ``[n]``, or fp32 ``[n, out]``."""
        if self.loss == "cross_entropy":
            return torch.empty(self.rows, dtype=torch.int64, device=device)
        return torch.empty(self.rows, self.out_features, device=device)


def plain_mlp(model: nn.Module, task: Task, who: str = "this") -> PlainMlp:
    """Reads a task as a :class:`PlainMlp`: a flat ``nn.Sequential`` of Linear, ReLU, Linear, ..., Flatten before it.
    Raises BackendUnavailable where the task is no such MLP; the message names the tasks that ``who`` trains."""
    only = f"{who} trains MLPs (Linear, ReLU, ..., Linear) with cross_entropy or mse, and SGD, Adam or AdamW"
    modules = list(model._modules.items())  # also an instance that stands twice, which named_children() says once
    first = modules[0][1] if modules else None
    flattens = type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1)
    layers = modules[flattens:]
    kinds = [type(module) for _, module in layers]
    alternate = len(kinds) % 2 == 1 and kinds == ([nn.Linear, nn.ReLU] * len(kinds))[: len(kinds)]
    if type(model).forward is not nn.Sequential.forward or not alternate:
        raise BackendUnavailable(f"{only}, not this {type(model).__name__}")
    if any("forward" in vars(m) or any(vars(m)[hooks] for hooks in HOOKS) for m in model.modules()):
        raise BackendUnavailable(f"{only}, and no layer may have hooks, or a forward that was put on it")
    linears = [(name, m) for name, m in layers if isinstance(m, nn.Linear)]
    if any(linear.bias is None for _, linear in linears):
        raise BackendUnavailable(f"{only}, and every Linear needs a bias")
    if task.loss not in ("cross_entropy", "mse"):
        raise BackendUnavailable(f"{only}, not another loss")
    mlp = PlainMlp(
        layers=tuple(name for name, _ in linears),
        sizes=(linears[0][1].in_features, *(linear.out_features for _, linear in linears)),
        flattens=flattens,
        loss=str(task.loss),
        rows=task.micro_batch_size,
        accumulate=task.accumulate,
        optimizer=require_known(task.optimizer, who),
    )
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if trained != set(mlp.names.values()) or len(trained) < len(list(model.parameters())):
        raise BackendUnavailable(f"{only}, and trains the weight and the bias of each Linear, and no other parameter")
    return mlp
