"""How far apart may two correct runs be? The same backend trains again under changes that must not matter."""

import copy
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

from mpcompare.checkpoints import Checkpoint
from mpcompare.contract import Backend, Batches, State, Stepper
from mpcompare.dtypes import unit_roundoff
from mpcompare.loss_scale import LossScale, NoLossScale
from mpcompare.race.turns import Progress
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import Params, Task, params_of, with_values
from mpcompare.verdict.examine import numerics


def train_again(
    make_backend: Callable[[nn.Module, LossScale], Backend],
    model: nn.Module,
    policy: LossScale,
    task: Task,
    precision: str,
    batches: Callable[[], Iterator[Batches]],
    steps: int,
    number: int,
    keep_scale: bool,
    begin: Checkpoint | None = None,
) -> Generator[Progress, Any, dict[str, Any]]:
    """Training once more.

    Weights are moved by less than the precision resolves, up to u |w|; the rows of each batch stand in another order,
    so that sums do, where the loss does not depend on it; the loss scale is another power of two, unless one
    overflowed (``keep_scale``), for it would skip other steps.

    Args:
        policy: the loss scale before the first step.
        number: of the run; another one draws other changes.
        begin: where to continue from; None: at the initial weights.

    Returns:
        ``change`` in words, ``losses`` and ``skipped`` step by step, ``moved``: ``numerics.sketch`` of how far the
        weights went.
    """
    generator = torch.Generator().manual_seed(number)
    u = unit_roundoff(precision)
    initial = params_of(model)
    start = {
        name: torch.rand(p.shape, generator=generator).mul_(2).sub_(1).mul_(u).add_(1).to(p.device).mul_(p)
        for name, p in (initial if begin is None else _like(begin.state["params"], initial)).items()
    }
    first_x, first_y = next(batches())[0]
    rows = torch.randperm(len(first_x), generator=generator).to(first_x.device)
    reorders = order_is_free(model, task.loss_fn, first_x, first_y)
    if not keep_scale:
        policy = at_scale(policy, policy.scale / 2 ** (number + 1))
    backend = make_backend(with_values(model, start, {}), policy)
    position, updates = 0, 0
    if begin is not None:
        position, updates, scale = begin.position, begin.updates, begin.state["loss_scale"]
        state = {**begin.state, "params": start, "loss_scale": {**scale, "scale": policy.scale} if scale else {}}
        backend.load_state_dict(cast(State, state))
    stepper = Stepper(backend, task.new_rates(updates))
    losses, skipped = [], []
    for batch in islice(batches(), position, position + steps):
        batch = [(x[rows], y[rows]) for x, y in batch] if reorders else batch
        losses.append(float(stepper.step(batch)))
        skipped.append(bool(backend.skipped))
        yield Progress(len(losses), steps, f"numerics: noise, run {number + 1}")
    changes = ["weights moved by less than they are rounded"]
    changes += ["rows in another order"] if reorders else []
    changes += [] if keep_scale or isinstance(policy, NoLossScale) else [f"loss scale {policy.scale:g}"]
    return {
        "change": ", ".join(changes),
        "losses": losses,
        "skipped": skipped,
        "moved": numerics.sketch({name: p - start[name] for name, p in backend.master_params().items()}),
    }


def _like(values: Mapping[str, Tensor], params: Params) -> Params:
    """The values of a checkpoint where the parameters are."""
    return {name: values[name].to(p.device) for name, p in params.items()}


def order_is_free(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> bool:
    """Whether the loss of a batch's first rows is that of the same rows in reverse, as it is for every mean."""
    network = copy.deepcopy(model).double()
    x, y = x[:16], y[:16]
    x, y = (t.double() if t.is_floating_point() else t for t in (x, y))
    with torch.no_grad():
        a, b = loss_fn(network(x), y), loss_fn(network(x.flip(0)), y.flip(0))
    return bool((a - b).abs() <= 1e-10 * a.abs())


def at_scale(policy: LossScale, scale: float) -> LossScale:
    """The same rules from another loss scale on, as far as they allow it."""
    if isinstance(policy, NoLossScale):
        return policy
    return replace(policy, init_scale=max(scale, getattr(policy, "min_scale", 0.0), 2.0**-126))
