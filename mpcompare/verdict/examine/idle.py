"""Parameters without a gradient in a step, such as those of a branch that is not taken: torch's optimizers leave them
as they are. A gradient of 0 in its place would let them decay, and their momentum move them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mpcompare.contract import Batches
from mpcompare.tasks.draws import as_examined
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import with_values
from mpcompare.verdict.examine import numerics


def idle(
    network: nn.Module, loss_fn: Loss, batches: Batches, grads: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> frozenset[str]:
    """Returns the parameters without a gradient in a step: those that a backend shows none of, and those that it shows
    a 0 of although the loss does not depend on them. Empty where it shows none at all.

    Args:
        network: of any weights.
        grads: as the backend shows them.
        before: the weights before the step.
    """
    if not grads:
        return frozenset()
    missing = {name for name in before if name not in grads}
    zero = {name for name, g in grads.items() if not bool(g.any())}
    # Whether the loss depends on them is asked only then, and costs a step.
    return frozenset(missing | (zero - reached(with_values(network, before, {}), loss_fn, batches) if zero else set()))


def reached(network: nn.Module, loss_fn: Loss, batches: Batches) -> set[str]:
    """Returns the parameters on which the loss of any micro-batch depends: those to which a backward in fp32 gives a
    gradient. ``network`` gets them."""
    with as_examined(batches[0][0].device), torch.enable_grad():
        for x, y in batches:
            loss_fn(network(x), y).backward()
    return {name for name, p in network.named_parameters() if p.grad is not None}


def moved(names: frozenset[str], before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, bool]:
    """Returns whether each of these weights changed in any bit."""
    return {name: not numerics.same_bits(before[name], after[name]) for name in sorted(names)}


def uses_all(network: nn.Module, grads: Mapping[str, Tensor]) -> bool:
    """Returns whether the loss of a step with these gradients depends on every parameter that is trained."""
    return all(name in grads for name, p in network.named_parameters() if p.requires_grad)
