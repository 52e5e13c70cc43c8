"""Weights that are not trained and are kept in 16 bits, such as the base below adapters (Hu et al., arXiv 2106.09685).

Everything that is compared is computed in fp32 and float64, so the network that the harness holds has them in fp32: the
values are the same, because fp32 holds every 16-bit number. A backend is given them as the user made them.
"""

from collections.abc import Mapping

import torch
from torch import nn

from mpcompare.dtypes import HALF
from mpcompare.tasks.copies import copy_of

_NOTED = "_frozen_dtypes"  # an attribute of the network, which its copies have, too


def widen(network: nn.Module) -> nn.Module:
    """Casts frozen 16-bit parameters to fp32, in place, and notes their dtypes in the network; returns it."""
    frozen = {name: p for name, p in network.named_parameters() if not p.requires_grad and p.dtype in HALF}
    if frozen:
        setattr(network, _NOTED, {name: p.dtype for name, p in frozen.items()})
    for p in frozen.values():
        p.data = p.data.float()
    return network


def dtypes_of(network: nn.Module) -> Mapping[str, torch.dtype]:
    """Returns, by name, the dtypes of the parameters that were widened."""
    return getattr(network, _NOTED, {})


def as_made(network: nn.Module) -> nn.Module:
    """Returns the network with frozen weights in the dtypes in which the user made them: a copy, or the network itself
    where no weight was widened."""
    if dtypes := dtypes_of(network):
        network = copy_of(network)
        for name, dtype in dtypes.items():
            parameter = network.get_parameter(name)
            parameter.data = parameter.data.to(dtype)
    return network
