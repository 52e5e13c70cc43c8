"""The pass ``overflow``: a new backend with a loss scale that is too large, and with an infinite input. Without a loss
scale there is only the infinite input: the pass ``infinite input``."""

import math
from dataclasses import replace

import torch
from torch import nn

from mpcompare.contract import Batches
from mpcompare.loss_scale import DynamicLossScale, LossScale
from mpcompare.precision import FORMATS, FP16
from mpcompare.tasks.batch import each
from mpcompare.tasks.optimizers import Optimizer
from mpcompare.verdict.examine.drive import Driver
from mpcompare.verdict.examine.oracle import Exact
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import LOWEST
from mpcompare.verdict.judge.drive import Drive


def overflow(subject: Subject) -> Drive:
    """Lets steps overflow, and takes some after them. The loss is scaled.

    A backend that computes a batch in parts has smaller sums, which overflow at a larger scale. So a backend that does
    not overflow at the first scale is driven again, at a scale at which the output's gradient overflows, row by row.
    """
    _, *follow = subject.first_batches
    if infinite := _infinite(subject, follow[2]):
        follow.insert(2, infinite)
    scaling = _too_large(subject.scaling, subject.exact.largest)
    driver = Driver(subject, scaling).through(follow)
    if driver.found.steps[0].finite and subject.precision.storage == FP16:  # bf16 would overflow at no scale
        scaling = _far_too_large(subject.examined, scaling, subject.exact)
        driver = Driver(subject, scaling).through(follow)
    return driver.result()


def infinite_input(subject: Subject, driver: Driver) -> Drive | None:
    """Gives an infinite input to the backend of the pass ``first`` where its loss is not scaled: nothing searches the
    gradients for inf there, so the step is taken. None where the loss is scaled, no input can be infinite, or the
    optimizer makes nothing of it. The pass ``first`` is over: the weights become NaN."""
    infinite = _infinite(subject, subject.first_batch)
    if subject.scaling.scales or infinite is None or not _moves_by_nan(subject.task.optimizer):
        return None
    driver.found = Drive()  # of this step alone
    driver.take(infinite)
    return Drive(driver.found.steps, next_scale=driver.found.next_scale)


def _moves_by_nan(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer moves a weight whose gradient is NaN. Rprop does not: NaN has no sign."""
    nan = torch.tensor([math.nan], dtype=torch.float64)
    change, _ = optimizer.replay().step("", nan, torch.ones_like(nan), optimizer.lr)
    return bool(change != 0)


def _infinite(subject: Subject, batch: Batches) -> Batches | None:
    """Returns the batch with an infinite input in one micro-batch (if there are several, it must not be forgotten);
    None where inputs are whole numbers, or the network makes whole numbers of them, such as the number of a branch."""
    (x, y), *others = batch
    if not x.is_floating_point():
        return None
    infinite = each(lambda t: torch.full_like(t, math.inf) if t.is_floating_point() else t, x)
    try:
        with torch.no_grad():
            subject.network()(infinite[:4])
    except Exception:  # a network may check its inputs
        return None
    return [(infinite, y), *others]


def _too_large(scaling: LossScale, largest: float) -> LossScale:
    """Returns the policy from the smallest scale on at which the largest gradient overflows in fp16, so that other
    gradients may not. A dynamic scale then backs off far enough at once, and grows again after two good steps. The
    ``largest`` element is of what a micro-batch adds to the gradients, in 16 bits; their sum has more bits."""
    exponent = math.ceil(math.log2(1.05 * FORMATS["fp16"].maximum / largest)) if 0 < largest < math.inf else 16
    scaling = scaling.starting_at(2.0 ** min(exponent, 120))
    if isinstance(scaling, DynamicLossScale):
        return replace(scaling, backoff_factor=2.0**-8, growth_interval=2)
    return scaling


def _far_too_large(network: nn.Module, scaling: LossScale, exact: Exact) -> LossScale:
    """Returns the policy of :func:`_too_large` from the scale on at which the gradient of the last product's output
    overflows in fp16: an element of this gradient belongs to one row, and is the same in a part of the batch. A dynamic
    scale backs off to the same scale as ``scaling``, the other policy, which is returned where no layers are seen."""
    if not (counts := exact.exponents.get("gradients of activations", {})):
        return scaling
    layers = {name: network.get_submodule(name.partition("#")[0]) for name in counts}
    products = [name for name, each in layers.items() if any(p.dim() > 1 for p in each.parameters(recurse=False))]
    *_, last = products or list(counts)
    largest = max(place for place, count in enumerate(counts[last]) if count)  # the first count is of zeros
    scale = 2.0 ** min(17 - (LOWEST + largest - 1), 120)
    if scale <= scaling.scale:
        return scaling
    higher = scaling.starting_at(scale)
    if isinstance(higher, DynamicLossScale):
        return replace(higher, backoff_factor=higher.backoff_factor * scaling.scale / scale)
    return higher
