"""The masters of a loop that makes them itself: wider copies of a network's weights, which the optimizer has.

The network is in 16 bits as a whole. The loop hands each gradient to the master of its weight, and copies the master
back after the update (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1).
"""

from collections.abc import Iterable

from torch import Tensor, nn

from mpcompare.dtypes import HALF
from mpcompare.verdict.examine.numerics import same_bits, spread


def masters_of(network: nn.Module, params: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns those parameters of optimizers that are masters, by the names of their weights. Several weights may have
    the same numbers, such as biases of 0. Their masters are expected in the order of the weights."""
    given, weights = {id(p): p for p in params}, dict(network.named_parameters())
    left = {n: p for n, p in weights.items() if p.requires_grad and p.dtype in HALF and id(p) not in given}
    own, found = set(map(id, weights.values())), {}
    for master in (p for place, p in given.items() if place not in own):
        if (name := next((n for n, p in left.items() if _is_master(master, p)), None)) is not None:
            found[name] = master
            del left[name]
    return found


def _is_master(master: Tensor, weight: Tensor) -> bool:
    if master.shape != weight.shape or master.dtype in HALF or not master.is_floating_point():
        return False
    return same_bits(spread(master).to(weight.device, weight.dtype), spread(weight))
