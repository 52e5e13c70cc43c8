"""The random numbers of a step, such as the masks of dropout: does a backend draw its reference's numbers?

Each examined step begins with the same state of torch's generators as the oracle's step. A backend that asks for the
same numbers in the same order leaves the generators in the same state, so it has the oracle's masks. A backend that
leaves them in another state, as a compiled network may, has other masks, and other gradients are no error. Then only
its losses and its gradients can be compared with the network's: they should vary alike from mask to mask.
"""

import copy
import math
from functools import partial
from typing import Any

from torch import nn

from mpcompare.contract import Batches, Walk
from mpcompare.tasks.draws import EXAMINED, masks_depend_on_dtype, seed_step, state
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import Params, put_buffers
from mpcompare.verdict.examine.new_step import begun
from mpcompare.verdict.examine.oracle import Exact
from mpcompare.verdict.examine.parts_of_batch import shares_of
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.judge.masks import Masks, MaskSamples

# The numbers of steps whose random numbers are drawn, for the mean gradient, for the network, and for the backend.
MEAN, EXACT, OWN = range(1, 9), range(9, 17), range(17, 19)


def forward_as_the_oracle(exact: Exact, walk: Walk) -> bool:
    """Takes a step up to the end of its first forward pass. Returns whether the step drew the oracle's random numbers;
    True where the oracle drew none."""
    device = next(iter(walk.backend.master_params().values())).device
    seed_step(EXAMINED)
    walk.through("forward")
    if not exact.drawn:
        return True
    after_forward, in_the_end = exact.drawn
    return state(device) == (in_the_end if walk.in_one_piece else after_forward)


def masks_of(subject: Subject, as_given: bool) -> Masks | None:
    """Returns whether a new backend draws in training the numbers of a plain call of the network. If it does not, it
    also returns samples of the backend's steps. None where the network draws nothing.

    Where a mask depends on the dtype that it is drawn for, backends of different dtypes have different masks. A
    backend that is not ``as_given`` calls the network with other rows, so it has other masks, too.
    """
    if not subject.exact.drawn:
        return None
    drawn = _drawn_by(subject.network(), subject.task.loss_fn, subject.first_batch)
    walk = begun(subject, subject.make_backend(subject.model, subject.scaling), through="forward")
    device = subject.first_batch[0][0].device
    training = state(device) == drawn[walk.in_one_piece] and not masks_depend_on_dtype(device)
    del walk  # frees its backend before the next backend is made
    return Masks(training and as_given, None if training else _samples(subject))


def _drawn_by(network: nn.Module, loss_fn: Loss, batch: Batches) -> list[str]:
    """Returns the states of the generators after the forward pass of the first micro-batch, and in the end."""
    states = []
    seed_step(EXAMINED)
    for x, y in batch:
        loss = loss_fn(network(x), y)
        states.append(state(x.device))
        loss.backward()
    return [states[0], state(x.device)]


def _samples(subject: Subject) -> MaskSamples:
    """Returns the first step of a backend with a few masks, and the first step of the network with many masks. All
    entrants of a race share the network's steps."""
    exact = subject.shared.once("masks", partial(_exact_samples, subject))
    scaling = subject.scaling.starting_at(subject.scaling.scale / 256)  # so that nothing overflows
    backend = subject.make_backend(subject.model, scaling)
    start = copy.deepcopy(backend.state_dict())
    losses, slopes = [], []
    for number in OWN:
        backend.load_state_dict(copy.deepcopy(start))
        walk = begun(subject, backend, number)
        losses.append(float(walk.loss))
        if not walk.in_one_piece or subject.task.clip_norm is None:
            slopes.append(_slope(backend.grads(), exact["direction"]))
        walk.finish()
    return MaskSamples(losses, exact["losses"], [s for s in slopes if math.isfinite(s)], exact["slopes"])


def _exact_samples(subject: Subject) -> dict[str, Any]:
    """Returns losses and slopes of the network's own steps. Slopes are relative to the mean gradient of other steps,
    which is returned, too."""
    network, batch, loss_fn = subject.network(), subject.first_batch, subject.task.loss_fn
    weights = shares_of(loss_fn, [y for _, y in batch])
    direction: Params = {}
    losses, slopes = [], []
    for number in (*MEAN, *EXACT):
        seed_step(number)
        before = copy.deepcopy(dict(network.named_buffers()))
        loss = 0.0
        for (x, y), weight in zip(batch, weights, strict=True):
            part = loss_fn(network(x), y) * weight
            part.backward()
            loss += part.item()
        grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        network.zero_grad(set_to_none=True)
        put_buffers(network, before)
        if number in MEAN:
            direction |= {name: g / len(MEAN) + direction.get(name, 0) for name, g in grads.items()}
        else:
            losses.append(loss)
            slopes.append(_slope(grads, direction))
    return {"losses": losses, "slopes": slopes, "direction": direction}


def _slope(grads: Params, direction: Params) -> float:
    """Returns the number that times ``direction`` is closest to ``grads``; NaN where none are shown. A gradient that is
    missing is 0, as of a layer that a step leaves out."""
    if not grads:
        return math.nan
    along = sum((grads[name].double() * d.double()).sum().item() for name, d in direction.items() if name in grads)
    return along / sum(d.double().square().sum().item() for d in direction.values())
