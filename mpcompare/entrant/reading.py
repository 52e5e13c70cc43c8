"""The end of a block: its loss and a line of every weight have been read, so whatever computed them is done."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpcompare.instruments.clock import Clock

_UNFORESEEN = random.SystemRandom()


class Lines:
    """One line of every weight of a backend, drawn at random: all elements that differ in their last index alone.

    To read them costs a wait for the device, a view of each weight and one copy to the host: 4 to 6 us of CPU time a
    weight, which is 0.01 % of a block of 250 ms for an MLP of 4 tensors, and 0.3 % for a network of 200. It is the same
    for every entrant, but for ``master_params()`` itself: where weights are kept in another form, all are copied, which
    moves less memory than one update does. Who asks a thread that still computes for its weights either waits for it,
    or gets weights that change afterwards: the weights that are compared with the examined backend's have these lines.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.places = {
            name: tuple(_UNFORESEEN.randrange(length) for length in p.shape[:-1])
            for name, p in backend.master_params().items()
            if p.numel()
        }

    def read(self, clock: Clock) -> Tensor:
        """Returns the lines one after the other, on the host."""
        clock.wait()
        return self.of(self.backend.master_params())

    def of(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Returns the lines of ``weights``, one after the other, on the host."""
        with torch.no_grad():
            lines = [weights[name][place].reshape(-1) for name, place in self.places.items()]
            return torch.cat(lines).cpu() if lines else torch.zeros(0)
