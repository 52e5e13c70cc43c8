"""The pass that asks what a backend computes: it is driven where its errors show, and what it does is written down.

first       from the initial weights: loss and gradients beside the float64 oracle, updates beside fp32 arithmetic
last        the trained backend's next step: its gradients beside those of a new one that starts from its weights
overflow    from the initial weights with a loss scale that is too large, and with an infinite input
policy      the loss scale of every training step, beside the one that the policy asks for
noise       trained again under changes that must not matter: how far apart may two correct runs be?

What is found are numbers; what they mean is said in report/verdict.py.
"""

import copy
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mpcompare.contract import DTYPES, Backend, step
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale
from mpcompare.measure import numerics
from mpcompare.race.turns import Progress
from mpcompare.tasks import mlp

Batch = tuple[Tensor, Tensor]
Found = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        make_backend: a new backend from initial weights and a policy, which it copies.
        params: the initial weights, fp32 on the device.
        policy: the loss scale as it starts.
        precision: resolved.
        batches: the training batches from the first on.
    """

    make_backend: Callable[[mlp.Params, LossScale], Backend]
    params: mlp.Params
    policy: LossScale
    precision: str
    task: mlp.Task
    batches: Callable[[], Iterator[Batch]]


def examine(
    subject: Subject, trained: Backend, rows: Sequence[dict[str, Any]], noise: int
) -> Generator[Progress, Any, Found]:
    """Everything above.

    Args:
        trained: the backend that training left, with all that it has become.
        rows: of ``steps.csv``.
        noise: how many more runs measure the noise; 0 for a backend that others are not compared with.
    """
    task = subject.task
    weights = _copy(trained.master_params())
    found: Found = {"moved": numerics.sketch({name: weights[name] - p for name, p in subject.params.items()})}
    found["policy"] = _first_wrong_scale(subject.policy, rows)

    yield Progress(0, 1, "numerics: gradients of the first step")
    batches = list(islice(subject.batches(), 4))
    exact = _oracle(subject, subject.params, batches[0], subject.precision)
    second = batches[1:2] if task.momentum else []  # which shows the momentum
    found["first"] = _watch(subject, subject.policy, batches[0], second, exact)

    yield Progress(0, 1, "numerics: gradients after training")
    after = next(islice(subject.batches(), len(rows), None))
    found["last"] = _beside_a_new_one(subject, trained, weights, after)
    found["exponents"] = {}
    if noise:
        last = _exponents(subject, weights, after)
        found["exponents"] = {"first": _exponents(subject, subject.params, batches[0]), "last": last}

    if not isinstance(subject.policy, NoLossScale):
        yield Progress(0, 1, "numerics: overflow")
        policy = _too_large(subject.policy, exact.grads)
        infinite = (torch.full_like(batches[3][0], math.inf), batches[3][1])
        found["overflow"] = _watch(subject, policy, batches[0], [*batches[1:3], infinite, batches[3]], exact)

    found["noise"] = []
    for number in range(noise):
        yield Progress(number, noise, f"numerics: noise, run {number + 1} of {noise}")
        found["noise"].append((yield from _again(subject, len(rows), number, any(row["skipped"] for row in rows))))
    found["unit_roundoff"] = torch.finfo(DTYPES[subject.precision]).eps / 2
    found["batch_size"] = task.batch_size
    found["longest_sum"] = max(task.batch_size, *task.sizes)
    return found


def _copy(tensors: Mapping[str, Tensor]) -> mlp.Params:
    return {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}


def _gradients(backend: Backend, x: Tensor, y: Tensor) -> tuple[float, mlp.Params]:
    """The first three phases of a step."""
    loss = backend.forward(x, y)
    backend.backward()
    backend.unscale()
    return float(loss), _copy(backend.grads())


@dataclass(frozen=True)
class _Exact:
    """What float64 makes of a batch, from the weights and inputs as the precision has them.

    Attributes:
        loss_noise: standard deviation of the loss if each stored activation is rounded once.
        subnormal: which part of the activations' gradients, 0 left out, is below fp16's normal numbers at the policy's
            first scale.
    """

    loss: float
    grads: mlp.Params
    loss_noise: float = 0.0
    subnormal: float = 0.0


def _oracle(subject: Subject, params: mlp.Params, batch: Batch, precision: str) -> _Exact:
    """The oracle starts from the 16-bit weights and inputs, which every implementation of the precision multiplies.

    What is left is what the implementation does. Beside unrounded ones that would drown in relu's masks: with the
    rounding of its inputs a unit next to 0 turns on or off, which is 20 times as much.

    A relative error uniform in +- u has the variance u^2 / 3, so var(loss) = u^2 / 3 sum (dz_i z_i)^2 over all z.
    """
    activations: dict[str, Tensor] = {}
    squares, small, nonzero = 0.0, 0, 0
    limit = torch.finfo(torch.float16).tiny / subject.policy.scale

    def look(name: str, values: Tensor) -> None:
        nonlocal squares, small, nonzero
        if not name.startswith("d"):
            activations[name] = values
            return
        squares += (values * activations.pop(name[1:])).square().sum().item()
        not_zero = int(values.count_nonzero())
        small += int((values.abs() < limit).sum()) - (values.numel() - not_zero)
        nonzero += not_zero

    rounded, x = _rounded(params, batch[0], precision)
    loss, grads = mlp.oracle(rounded, x, batch[1], subject.task.loss, see=look)
    noise = torch.finfo(DTYPES[precision]).eps / 2 * math.sqrt(squares / 3)
    return _Exact(loss, grads, noise, small / max(nonzero, 1))


def _rounded(params: mlp.Params, x: Tensor, precision: str) -> tuple[mlp.Params, Tensor]:
    dtype = DTYPES[precision]
    return {name: p.to(dtype).float() for name, p in params.items()}, x.to(dtype).float()


def _exponents(subject: Subject, params: mlp.Params, batch: Batch) -> dict[str, list[int]]:
    """``numerics.exponents`` of all activations, gradients, and of ``lr |g| / |w|``; in fp32, which holds them all."""
    counts: dict[str, Tensor] = {}

    def count(name: str, values: Tensor) -> None:
        counts[name] = counts.get(name, 0) + numerics.exponents(values)

    rounded, x = _rounded(params, batch[0], subject.precision)
    _, grads = mlp.oracle(rounded, x, batch[1], subject.task.loss, see=count, dtype=torch.float32)
    for name, g in grads.items():
        count(f"d{name}", g)
        count(f"update of {name}", (subject.task.lr * g / params[name])[params[name] != 0])
    return {name: values.tolist() for name, values in counts.items()}


def _effective_precision(subject: Subject, grads: mlp.Params, errors: Found) -> str:
    """The precision that the gradients show: the one asked for, beside whose oracle they have ``errors``, unless
    another's is far closer."""
    found, error = subject.precision, _largest(errors)
    if found in ("fp32", "tf32") or error <= torch.finfo(DTYPES[found]).eps:
        return found  # others need not be tried
    for other in ("fp32", "fp16", "bf16"):
        if DTYPES[other] is not DTYPES[subject.precision]:
            exact = _oracle(subject, subject.params, next(subject.batches()), other)
            other_error = _largest(numerics.gradient_errors(grads, exact.grads))
            if other_error < error / 4:
                found, error = other, other_error
    return found if error <= 8 * torch.finfo(DTYPES[found]).eps else subject.precision


def _largest(errors: Found) -> float:
    """Relative error of all tensors."""
    return max(map(numerics.relative_error, errors.values()))


def _beside_oracle(loss: float, grads: mlp.Params, exact: _Exact) -> Found:
    """``gradients`` only if the backend shows any."""
    errors = {"gradients": numerics.gradient_errors(grads, exact.grads)} if grads else {}
    return {"loss": loss, "exact_loss": exact.loss, "loss_noise": exact.loss_noise, **errors}


def _beside_a_new_one(subject: Subject, trained: Backend, weights: mlp.Params, batch: Batch) -> Found:
    """Loss and gradients of the trained backend beside those of a new one from the same weights at the same loss scale.

    Both round alike, so they are equal but for the order of sums, unless the trained one computes with anything else
    than its weights. Beside the oracle a unit next to 0 could make up for all of the error.
    """
    policy = _at(subject.policy, float(trained.loss_scale()))
    loss, grads = _gradients(trained, *batch)
    trained.step()
    trained.update()
    new = subject.make_backend(weights, policy)
    new_loss, new_grads = _gradients(new, *batch)
    exact = {name: g.double() for name, g in new_grads.items()}
    return _beside_oracle(loss, grads, _Exact(new_loss, exact))


RETRIES = 40  # a scale of 2^24 that halves gets everywhere in fewer


def _watch(subject: Subject, policy: LossScale, start: Batch, follow: Sequence[Batch], exact: _Exact) -> Found:
    """A new backend takes the batch ``start`` until its gradients are finite, then the batches ``follow``.

    Returns:
        ``steps``: what the policy and the parameters did in each; ``updates``: those of ``numerics.Optimizer.errors``;
        and of the first finite step of ``start``, if there was one: ``loss``, ``gradients`` and ``first_update`` beside
        the oracle; ``subnormal`` as in ``_Exact``.
    """
    backend = subject.make_backend(subject.params, policy)
    policy, optimizer = copy.deepcopy(policy), numerics.Optimizer(subject.task.lr, subject.task.momentum)
    checks = not isinstance(policy, NoLossScale)
    found: Found = {"steps": [], "updates": []}

    def take(x: Tensor, y: Tensor) -> bool:
        before, scale = _copy(backend.master_params()), float(backend.loss_scale())
        loss, grads = _gradients(backend, x, y)
        backend.step()
        after, skipped = _copy(backend.master_params()), bool(backend.skipped)
        backend.update()
        finite = all(bool(g.isfinite().all()) for g in grads.values())
        found["steps"].append(
            {
                "finite": finite,
                "skipped": skipped,
                "should_skip": checks and not finite,
                "moved": any(not _same_bits(before[name], after[name]) for name in before),
                "loss_scale": scale,
                "should_scale": policy.scale,
            }
        )
        policy.update(not finite)
        found["next_scale"] = {"loss_scale": float(backend.loss_scale()), "should_scale": policy.scale}
        if finite and not skipped:
            found["updates"].append(optimizer.errors(before, after, grads, DTYPES[subject.precision]))
        if finite and "first_update" not in found:
            found["subnormal"] = exact.subnormal
            found["first_update"] = _first_update(before, after, exact.grads, subject.task.lr)
            found.update(_beside_oracle(loss, grads, exact))
            if grads:
                found["effective_precision"] = _effective_precision(subject, grads, found["gradients"])
        return finite

    for _ in range(RETRIES):
        if take(*start) or not isinstance(policy, DynamicLossScale):
            break
    for x, y in follow:
        take(x, y)
    return found


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def _first_update(before: mlp.Params, after: mlp.Params, exact: mlp.Params, lr: float) -> dict[str, dict[str, float]]:
    """``error``: of the update beside the oracle's, ``-lr g``; ``norm`` of that, and of the weights."""
    return {
        name: {
            "error": (after[name].double() - before[name].double() + lr * g).norm().item(),
            "norm": lr * g.norm().item(),
            "largest": lr * g.abs().max().item(),
            "weights": before[name].double().norm().item(),
        }
        for name, g in exact.items()
    }


def _too_large(policy: LossScale, exact: mlp.Params) -> LossScale:
    """The policy with the smallest scale at which the largest gradient overflows in fp16, so that the others may not; a
    dynamic one then backs off far enough at once, and grows again after two good steps."""
    largest = max(g.abs().max().item() for g in exact.values())
    exponent = math.ceil(math.log2(1.05 * torch.finfo(torch.float16).max / largest)) if 0 < largest < math.inf else 16
    policy = _at(policy, 2.0 ** min(exponent, 120))
    return (
        replace(policy, backoff_factor=2.0**-8, growth_interval=2) if isinstance(policy, DynamicLossScale) else policy
    )


def _at(policy: LossScale, scale: float) -> LossScale:
    """The same rules from another loss scale on, as far as they allow it."""
    if isinstance(policy, NoLossScale):
        return policy
    return replace(policy, init_scale=max(scale, getattr(policy, "min_scale", 0.0), 2.0**-126))


def _first_wrong_scale(policy: LossScale, rows: Sequence[dict[str, Any]]) -> Found | None:
    """The first training step whose loss scale is not what the policy makes of the steps that were skipped."""
    policy = copy.deepcopy(policy)
    for row in rows:
        if row["loss_scale"] != policy.scale:
            return {"step": row["step"], "loss_scale": row["loss_scale"], "should_scale": policy.scale}
        policy.update(row["skipped"])
    return None


def _again(subject: Subject, steps: int, number: int, keep_scale: bool) -> Generator[Progress, Any, Found]:
    """Training once more under changes that must not matter.

    Rows and hidden units in another order, so that sums are; another power of two as loss scale; weights moved by less
    than the precision resolves, up to u |w|.
    """
    task, generator = subject.task, torch.Generator().manual_seed(number)
    device = subject.params["W1"].device
    rows = torch.randperm(task.batch_size, generator=generator).to(device)
    units = [torch.randperm(width, generator=generator).to(device) for width in task.sizes]
    units[0], units[-1] = (torch.arange(width, device=device) for width in (task.in_features, task.out_features))
    policy = subject.policy
    if not keep_scale:  # one that overflowed would skip other steps
        policy = _at(policy, policy.scale / 2 ** (number + 1))
    unit_roundoff = torch.finfo(DTYPES[subject.precision]).eps / 2
    start = {
        name: p * (1 + unit_roundoff * (2 * torch.rand(p.shape, generator=generator) - 1).to(device))
        for name, p in subject.params.items()
    }
    backend = subject.make_backend(_reordered(start, units), policy)
    losses = []
    for x, y in islice(subject.batches(), steps):
        losses.append(float(step(backend, x[rows], y[rows])))
        yield Progress(len(losses), steps, f"numerics: noise, run {number + 1}")
    back = _reordered(_copy(backend.master_params()), [order.argsort() for order in units])
    return {
        "change": "rows and hidden units in another order, weights moved by less than they are rounded"
        + (f", loss scale {policy.scale:g}" if policy.scale != subject.policy.scale else ""),
        "losses": losses,
        "moved": numerics.sketch({name: back[name] - p for name, p in start.items()}),
    }


def _reordered(params: mlp.Params, units: Sequence[Tensor]) -> mlp.Params:
    """The same network with the units of each layer, inputs first, in the order ``units``."""
    changed = {}
    for layer in range(1, len(units)):
        changed[f"W{layer}"] = params[f"W{layer}"][units[layer - 1]][:, units[layer]].contiguous()
        changed[f"b{layer}"] = params[f"b{layer}"][units[layer]]
    return changed
