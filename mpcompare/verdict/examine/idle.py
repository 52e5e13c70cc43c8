"""Parameters without a gradient in a step, as in a branch that is not taken: torch's optimizers leave such parameters
as they are. With a gradient of 0 they would decay, and their momentum would move them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mpcompare.contract import Batches
from mpcompare.tasks.draws import as_examined
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import with_values
from mpcompare.verdict.examine import numerics


def idle(
    network: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    grads: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> frozenset[str]:
    """Returns the parameters without a gradient in a step: the backend shows no gradient of them, or a gradient of 0
    though the loss does not depend on them. Empty where the backend shows no gradients at all.

    Args:
        network: the network, with any weights and buffers.
        grads: the gradients that the backend shows.
        before, buffers: the weights and buffers before the step.
    """
    if not grads:
        return frozenset()
    missing = {name for name in before if name not in grads}
    zero = {name for name, g in grads.items() if not bool(g.any())}
    # A step tells whether the loss depends on parameters whose gradient is 0. It is taken only if there are any.
    return frozenset(
        missing | (zero - reached(with_values(network, before, buffers), loss_fn, batches) if zero else set())
    )


def reached(network: nn.Module, loss_fn: Loss, batches: Batches) -> set[str]:
    """Returns the parameters on which the loss of any micro-batch depends: a backward in fp32 gives them a gradient.
    ``network`` gets these gradients."""
    with as_examined(batches[0][0].device), torch.enable_grad():
        for x, y in batches:
            loss_fn(network(x), y).backward()
    return {name for name, p in network.named_parameters() if p.grad is not None}


def moved(names: frozenset[str], before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, bool]:
    """Returns for each of these weights whether any bit changed."""
    return {name: not numerics.same_bits(before[name], after[name]) for name in sorted(names)}
