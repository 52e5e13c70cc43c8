"""The numbers that are read of a backend at the end of a block: a line of every weight, so that whatever computed them
is done; and a sample of all that it has learned, for any timed block may be compared."""

import math
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Kinds = dict[str, dict[str, Tensor]]
Tensors = Mapping[str, Tensor]

# Of each kind: 128 KB of weights, as many of each moment. A thousandth of the weights of GPT-2 are more.
NUMBERS = 1 << 15

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

    def of(self, weights: Tensors, buffers: Tensors, optimizer: Mapping[str, Tensors]) -> Kinds:
        """Returns values of weights, buffers and the optimizer's tensors, by kind, fp32 on the host."""
        kinds = {"weights": weights, "buffers": buffers, **optimizer}
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


@dataclass(frozen=True)
class Ended:
    """The end of a block."""

    seeds: tuple[int, int]  # those of its batches: of the steps before the clock started, and of those after it
    losses: tuple[float, float]  # of its first step, which is not timed, and of its last
    sample: Sample  # the elements that were looked at
    left: Kinds  # their values, by kind


class Lines:
    """One line of every weight of a backend, drawn at random: all elements that differ in their last index alone.

    To read them costs a wait for the device, a view of each weight and one copy to the host: 4 to 6 us of CPU time a
    weight, which is 0.01 % of a block of 250 ms for an MLP of 4 tensors, and 0.3 % for a network of 200. It is the same
    for every entrant, but for ``master_params()`` itself: where weights are kept in another form, all are copied, which
    moves less memory than one update does. Who asks a thread that still computes for its weights either waits for it,
    or gets weights that change afterwards: the weights that are compared with the examined backend's have these lines.
    """

    def __init__(self, weights: Tensors) -> None:
        self.places = {
            name: tuple(_UNFORESEEN.randrange(length) for length in p.shape[:-1])
            for name, p in weights.items()
            if p.numel()
        }

    def of(self, weights: Tensors) -> Tensor:
        """Returns the lines of ``weights``, one after the other, on the host."""
        with torch.no_grad():
            lines = [weights[name][place].reshape(-1) for name, place in self.places.items()]
            return torch.cat(lines).cpu() if lines else torch.zeros(0)
