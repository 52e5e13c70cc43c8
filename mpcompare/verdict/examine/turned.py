"""The oracle's step with those units of an MLP turned on or off that a backend's roundings turned.

A unit next to 0 is on or off by the rounding of its input, and both are right: whoever adds the bias to a product that
was rounded, as Keras and Flax do, may turn it, and whoever adds it in fp32 may not. One unit of 8192 is worth 7e-3 of
a gradient's norm, which is 14 roundings in fp16. So the units that one rounding of each result may turn are known
beforehand, and each is taken as turned if the gradients of its own layer are nearer to that.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpcompare.contract import Batches
from mpcompare.tasks.mlp import PlainMlp, is_plain_mlp, plain_mlp
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.oracle import Exact, rounded, rounded_batch
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import Errors

DEVIATIONS = 4  # by which an input of a unit may be off: as many as the loss may, in 16000 cases one is off by more
MANY = 4096  # units of a layer, from which on the errors that they make are those of many, as the reference's are
ROWS = 1024  # of a batch, which are looked at first: often so few have as many such units


def as_turned(subject: Subject, batches: Batches, exact: Exact, grads: Mapping[str, Tensor], errors: Errors) -> Exact:
    """Returns the oracle's step on ``batches``, with units turned as the gradients of a backend show it: as it is where
    they are right within one rounding, and for networks other than a plain MLP, whose twin has no such units. Turned
    units are believed only if they are the reason: if the errors, each relative to its tensor, are halved by them.

    Args:
        errors: of the gradients beside ``exact``.
    """
    u = subject.precision.unit_roundoff
    right = all(e is not None and e.error <= u * e.norm for e in errors.values())
    if right or grads.keys() != exact.grads.keys() or not is_plain_mlp(subject.examined, subject.task):
        return exact
    units = _Units.of(subject, plain_mlp(subject.examined, subject.task), batches)
    if units is None:
        return exact
    before = {name: e.error / (e.norm or math.inf) for name, e in errors.items() if e is not None}
    changed = units.changed()
    others = {name: e for name, e in before.items() if name not in changed}
    if math.hypot(*others.values()) > math.hypot(*before.values()) / 2:
        return exact
    turned = units.turned(exact.grads, grads)
    after = others | {name: _relative_error(turned[name], grads[name]) for name in changed}
    halved = math.hypot(*after.values()) <= math.hypot(*before.values()) / 2
    return replace(exact, grads=turned) if halved else exact


@dataclass(frozen=True)
class _Units:
    """The hidden units of an MLP, row by row of a batch; lists have an entry for each layer.

    Attributes:
        names: of the linear layers.
        weights: theirs, rounded, ``[out, in]``.
        inputs: theirs, ``[row, in]``.
        on: whether a unit is on, ``[row, unit]``, of the hidden layers, as all that follow.
        near: whether one rounding of each result may turn it.
        passed: the gradient of the loss with respect to its output.
    """

    names: tuple[str, ...]
    weights: list[Tensor]
    inputs: list[Tensor]
    on: list[Tensor]
    near: list[Tensor]
    passed: list[Tensor]

    @classmethod
    def of(cls, subject: Subject, mlp: PlainMlp, batches: Batches) -> "_Units | None":
        """Computes them in fp32, whose errors are small beside those of 16 bits. None where no layer has units that may
        turn, and few of them."""
        params = dict(rounded(subject.examined, subject.precision).named_parameters())
        layers = [(params[f"{name}.weight"].detach(), params[f"{name}.bias"].detach()) for name in mlp.layers]
        rows = [rounded_batch(x, y, subject.precision, torch.float32) for x, y in batches]
        x, y = torch.cat([x for x, _ in rows]).flatten(1), torch.cat([y for _, y in rows])
        if len(x) > ROWS and all(_many(near) for near in _hidden(subject, layers, x[:ROWS])[2]):
            return None
        inputs, on, near = _hidden(subject, layers, x)
        if not any(_few(turning) for turning in near):
            return None
        weights, bias = [weight for weight, _ in layers], layers[-1][1]
        output = (inputs[-1] @ weights[-1].t() + bias).requires_grad_()
        (back,) = torch.autograd.grad(subject.task.loss_fn(output, y), output)
        passed: list[Tensor] = []
        for layer in range(len(on) - 1, -1, -1):
            passed.insert(0, back @ weights[layer + 1])
            back = passed[0] * on[layer]
        return cls(mlp.layers, weights, inputs, on, near, passed)

    def changed(self) -> list[str]:
        """Returns the parameters whose gradients change if units are turned: those of the last layer with few that may
        turn, and of all below."""
        last = max(layer for layer, near in enumerate(self.near) if _few(near))
        return [f"{name}.{part}" for name in self.names[: last + 1] for part in ("weight", "bias")]

    def turned(self, exact: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> "_Turned":
        """Returns the gradients ``exact`` with units turned, from the last hidden layer down: turning one changes the
        gradients of its own layer and of those below."""
        turned = _Turned(exact, {})
        for layer in range(len(self.on) - 1, -1, -1):
            if not _few(self.near[layer]):
                continue
            rows, units = self.near[layer].nonzero(as_tuple=True)
            signs = 1 - 2 * self.on[layer][rows, units].double()
            change = self.passed[layer][rows, units].double() * signs
            chosen = self._chosen(layer, (rows, units, change), turned, grads)
            delta = torch.zeros(len(chosen), self.on[layer].shape[1], dtype=torch.float64, device=change.device)
            delta[torch.arange(len(chosen)), units[chosen]] = change[chosen]
            for below in range(layer, -1, -1):
                turned.changes.setdefault(self.names[below], []).append((delta, self.inputs[below], rows[chosen]))
                if below:
                    delta = (delta @ self.weights[below].double()) * self.on[below - 1][rows[chosen]]
        return turned

    def _chosen(
        self, layer: int, units: tuple[Tensor, Tensor, Tensor], exact: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> list[int]:
        """Returns which of a layer's units bring the gradients nearer to those of a backend, one after the other.

        Args:
            units: row and number of each, and the change that turning it makes in the gradient of its input.
        """
        name = self.names[layer]
        weight = grads[f"{name}.weight"]
        rest = torch.empty(weight.shape[0], weight.shape[1] + 1, dtype=torch.float64, device=weight.device)
        for columns, part in ((rest[:, :-1], f"{name}.weight"), (rest[:, -1], f"{name}.bias")):
            columns.copy_(grads[part]).sub_(exact[part])
        rows, numbers, change = units

        def steps_of(some: Tensor) -> Tensor:
            """Returns what turning these units changes in the gradients of their weights and biases, one row each."""
            inputs = self.inputs[layer][rows[some]].double()
            return torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1).mul_(change[some, None])

        pieces = torch.arange(len(rows), device=rows.device).split(64)
        gains = torch.cat([_gains(rest[numbers[some]], steps_of(some)) for some in pieces])
        chosen = []
        for unit in gains.argsort(descending=True)[: int((gains > 0).sum())]:
            row, step = rest[numbers[unit]], steps_of(unit[None])[0]
            if _gains(row, step) > 0:
                row -= step
                chosen.append(int(unit))
        return chosen


def _gains(rest: Tensor, steps: Tensor) -> Tensor:
    """Returns by how much the squared norms of what is left of some rows fall if these steps are taken."""
    return (2 * rest * steps).sub_(steps.square()).sum(-1)


@dataclass(frozen=True)
class _Turned(Mapping[str, Tensor]):
    """Gradients with units turned. Each is computed when it is asked for: all together are twice as large as the
    network.

    Attributes:
        exact: the gradients as they are.
        changes: by linear layer, those of the gradients of its outputs in some rows, ``[change, out]``, with the inputs
            of all rows, ``[row, in]``, and the numbers of these.
    """

    exact: Mapping[str, Tensor]
    changes: dict[str, list[tuple[Tensor, Tensor, Tensor]]]

    def __getitem__(self, name: str) -> Tensor:
        layer, _, part = name.rpartition(".")
        grad = self.exact[name]
        for delta, inputs, rows in self.changes.get(layer, []):
            grad = torch.addmm(grad, delta.t(), inputs[rows].double()) if part == "weight" else grad + delta.sum(0)
        return grad

    def __iter__(self) -> Iterator[str]:
        return iter(self.exact)

    def __len__(self) -> int:
        return len(self.exact)


def _hidden(
    subject: Subject, layers: Sequence[tuple[Tensor, Tensor]], z: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Returns ``inputs``, ``on`` and ``near`` of :class:`_Units` for some rows.

    A relative error uniform in +- u has the variance u^2 / 3. The products may be rounded, then their sum with the
    bias, and the errors of a layer's inputs add up in the next one.

    Args:
        layers: weight and bias of each.
    """
    u2 = subject.precision.unit_roundoff**2 / 3
    inputs, on, near, variance = [z], [], [], torch.zeros_like(z)
    for weight, bias in layers[:-1]:
        product = z @ weight.t()
        a = product + bias
        variance = variance @ weight.square().t() + u2 * product.square()
        on.append(a > 0)
        near.append(a.square() <= DEVIATIONS**2 * variance)
        z, variance = a.relu(), (variance + u2 * a.square()) * on[-1]
        inputs.append(z)
    return inputs, on, near


def _few(near: Tensor) -> bool:
    return bool(near.any()) and not _many(near)


def _many(near: Tensor) -> bool:
    return int(near.count_nonzero()) > MANY


def _relative_error(exact: Tensor, grad: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(exact)) or math.inf
    return numerics.distance({"": exact}, {"": grad}) / norm
