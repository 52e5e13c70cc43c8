"""Keeps warnings that concern our copies of a network away from the terminal of its user."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# cuDNN wants the weights of a recurrent layer in one row. The weights of a copy are cast one by one.
SCATTERED = "RNN module weights are not part of single contiguous chunk of memory"


@contextmanager
def quietly(network: nn.Module) -> Iterator[None]:
    """Such warnings are not shown while it is entered."""
    if not any(isinstance(module, nn.RNNBase) for module in network.modules()):
        yield  # a change of the filters makes Python forget which warnings it has shown
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SCATTERED)
        yield
