"""The pass ``sharp``: gradients at weights at which nothing is nearly linear.

At the initial weights attention is nearly uniform and units stay near 0, so a soft cap, a saturation or positions that
are rounded change hardly anything. Here the weights of every layer of products are multiplied until its output has a
spread of several units, biases and the factors of norms are moved, and all of it is rounded to the precision, so that
every implementation holds the same weights. They follow from the initial weights and the first batch: entrants share
them, with their oracle and the error of one rounding of each result there.
"""

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.contract import Batches, Walk
from mpcompare.dtypes import rounded_to
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.precision import Precision
from mpcompare.tasks.task import Params, params_of, with_values
from mpcompare.verdict.examine.drive import RETRIES, beside, by_rows, own_factor
from mpcompare.verdict.examine.ground import Ground
from mpcompare.verdict.examine.kinks import Kinks, beside_turned_units
from mpcompare.verdict.examine.oracle import Exact, exact_step, rows_are_independent
from mpcompare.verdict.examine.rounding import rounding_errors
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import RoundingError, Sharp

SPREAD, OF_LOGITS = 3.0, 8.0  # standard deviations of the outputs of layers of products, and of the last one
MOVED = 0.25  # biases and factors of norms, which begin at 0 and 1, are moved by so much
RECURRENT = {"weight_hh": 1.0}  # and 2 of all other weights of layers that are no single product
ROWS = range(8, 33)  # of the batch that are taken if they do not depend on each other
SAMPLES = 4
SHARE = 0.5  # of the error of one rounding of each result that kinks may add: an eighth of it, in squares


def sharp(subject: Subject, batch: Batches) -> Sharp | None:
    """Takes a step of a new backend at these weights up to its gradients; None where none are finite. None, too, of a
    network that draws random numbers, whose masks are not those of other rows, and of one with kinks that tell, as
    those of plain MLPs do.

    Args:
        batch: the first one, whose first rows are repeated to fill it.
    """
    values = subject.exactly.once(
        f"sharp-{subject.precision.name}", subject.ground(batch), _sharp_values, subject.precision
    )
    if not values:
        return None
    network = with_values(subject.examined, values["params"], {})
    exact = Exact(values["loss"], values["grads"], {}, values["loss_noise"])
    x, y = (t[: values["rows"]] for t in batch[0])
    few = [(_repeated(x, len(each)), _repeated(y, len(each))) for each, _ in batch]
    backend: Any = subject.make_backend(network, subject.scaling)
    lr = float(subject.task.new_rates().now)
    for _ in range(RETRIES if isinstance(subject.scaling, DynamicLossScale) else 1):
        walk = Walk(backend, few, lr)
        walk.through("unscale")
        factor = own_factor(backend, subject.task) if walk.in_one_piece else 1.0
        grads = {name: g.div_(factor) for name, g in by_rows(backend.grads()).items()}
        if all(bool(g.isfinite().all()) for g in grads.values()):
            rounding = {name: RoundingError(**error) for name, error in values["rounding"].items()}
            return Sharp(beside(float(walk.loss), grads, exact), rounding)
        walk.finish()
    return None


def few_rows(ground: Ground) -> tuple[Tensor, Tensor]:
    """Returns the first rows of a micro-batch, so many that they fill it if they are repeated; all of it where rows
    depend on each other."""
    x, y = ground.batch[0]
    parts = [n for n in ROWS if len(x) % n == 0 and n < len(x)]
    if not parts:
        return x, y
    exact = [t[:8].double() if t.is_floating_point() else t[:8] for t in (x, y)]
    if not rows_are_independent(copy.deepcopy(ground.network).double(), ground.loss_fn, *exact):
        return x, y
    return x[: parts[-1]], y[: parts[-1]]


def _repeated(rows: Tensor, number: int) -> Tensor:
    return rows.repeat(number // len(rows), *[1] * (rows.dim() - 1))


def _sharp_values(ground: Ground, precision: Precision) -> dict[str, Any]:
    x, y = few_rows(ground)
    with Kinks() as kinks:
        params = sharpened(ground.network, x, precision)
    network, u = with_values(ground.network, params, {}), precision.unit_roundoff
    step = partial(exact_step, network, ground.loss_fn, [(x, y)], precision)
    if kinks.of_relu or kinks.others:  # in fp32 a step costs a quarter, and mostly it is enough to see that they tell
        exact, turned = beside_turned_units(partial(step, dtype=torch.float32), u)
        if _tell(turned, _judged(exact, u)):
            return {}
    exact, turned = beside_turned_units(step, u)
    if exact.drawn or _tell(turned, _judged(exact, u)):
        return {}
    errors = rounding_errors(network, ground.loss_fn, [(x, y)], precision, SAMPLES)
    if _tell(turned, {name: error.error for name, error in errors.items()}):
        return {}
    rounding = {name: vars(error) for name, error in errors.items()}
    numbers = {"rows": len(x), "loss": exact.loss, "loss_noise": exact.loss_noise}
    return {**numbers, "grads": exact.grads, "params": params, "rounding": rounding}


def _judged(exact: Exact, u: float) -> dict[str, float]:
    """Returns the largest error of each gradient that is judged."""
    return {name: math.sqrt(u) * g.norm().item() for name, g in exact.grads.items()}


def _tell(turned: Mapping[str, float], rounding: Mapping[str, float]) -> bool:
    """Returns whether errors at kinks are no small part of those of rounding."""
    return any(not error <= SHARE * rounding[name] for name, error in turned.items() if name in rounding)


def sharpened(network: nn.Module, x: Tensor, precision: Precision) -> Params:
    """Returns weights of the network at which the outputs of its products spread over several units; those of each
    layer are set when it is called with ``x``."""
    network = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(0)
    done: list[nn.Module] = []
    with torch.no_grad():
        for p in network.parameters():
            if p.numel() and bool((p == p.flatten()[0]).all()) and p.dim() < 2:
                p.add_(torch.randn(p.shape, generator=generator).mul_(MOVED).to(p.device))
        for module in network.modules():
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)):
                _spread_by_size(module)
        hook = _spread_by_output(done, generator)
        for module in network.modules():
            if isinstance(module, (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)):
                module.register_forward_hook(hook)
        network(x)
        if done:
            done[-1].weight.mul_(OF_LOGITS / SPREAD)  # type: ignore[operator]
    return {name: rounded_to(p, precision.storage) for name, p in params_of(network).items()}


def _spread_by_output(done: list[nn.Module], generator: torch.Generator) -> Callable[..., Any]:
    """Returns a hook that multiplies a layer's weights until its output spreads over SPREAD, and adds the layer to
    ``done``. The factors are powers of 2^(1/4), so that no order of sums changes them."""

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        weight = module._parameters.get("weight")
        if weight is None or module in done:
            return None
        done.append(module)
        if not weight.any():
            drawn = torch.randn(weight.shape, generator=generator).div_(math.sqrt(max(weight[0].numel(), 1)))
            weight.copy_(drawn.to(weight.device))
            output = module.forward(*inputs)
        spread = float(output.std())
        if 0 < spread < math.inf:
            weight.mul_(2 ** (round(4 * math.log2(SPREAD / spread)) / 4))
        return module.forward(*inputs)

    return hook


def _spread_by_size(module: nn.Module) -> None:
    """Multiplies the matrices of a layer whose products cannot be seen, so that inputs of size 1 make outputs of size
    2, and states outputs of size 1: with more the errors of recurrent layers grow from step to step."""
    for name, p in module.named_parameters(recurse=False):
        size = float(p.square().mean().sqrt()) * math.sqrt(p.shape[-1])
        if p.dim() == 2 and size > 0:
            gain = next((gain for part, gain in RECURRENT.items() if name.startswith(part)), 2.0)
            p.mul_(gain / size)
