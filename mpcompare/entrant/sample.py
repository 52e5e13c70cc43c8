"""A sample of all that a backend has learned: any timed block may be compared, so something of every one is kept."""

import math
import random
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.contract import State

Kinds = dict[str, dict[str, Tensor]]

NUMBERS = (
    1 << 15
)  # of each kind: 128 KB of weights, as many of each moment. A thousandth of the weights of GPT-2 are more

_UNFORESEEN = random.SystemRandom()


class Sample:
    """Elements of every tensor, drawn at random for each block when it is over; all of a tensor that has few.

    A value stands for all elements of its tensor that were left out, so it is multiplied by the root of their number:
    distances of samples are those of the tensors, within the part 1 / sqrt(2 n) where n elements differ alike.
    """

    def __init__(self, model: nn.Module) -> None:
        """``model`` is the network, whose tensors share the sample."""
        self.most = max(1, NUMBERS // len(list(model.parameters())))
        self.seed = _UNFORESEEN.getrandbits(32)

    def of(self, backend: Any, weights: Mapping[str, Tensor]) -> Kinds:
        """Returns values of the ``weights`` of a backend, its buffers and the optimizer's tensors, by kind, fp32 on the
        host."""
        return self._all({"weights": weights, "buffers": backend.buffers(), **backend.state_dict()["optimizer"]})

    def of_state(self, state: State) -> Kinds:
        """Returns the same of a :class:`State`."""
        return self._all({"weights": state["params"], "buffers": state["buffers"], **state["optimizer"]})

    def _all(self, kinds: Mapping[str, Mapping[str, Tensor]]) -> Kinds:
        found = {
            kind: {name: self._values(name, t.detach()) for name, t in tensors.items() if t.is_floating_point()}
            for kind, tensors in kinds.items()
        }
        return {kind: values for kind, values in found.items() if values}

    def _values(self, name: str, t: Tensor) -> Tensor:
        if t.numel() <= self.most:
            return t.flatten().to("cpu", torch.float32, copy=True)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        places = torch.randint(t.numel(), (self.most,), generator=generator).to(t.device)
        return t[torch.unravel_index(places, t.shape)].float().cpu() * math.sqrt(t.numel() / self.most)
