"""The numbers that are read from a backend at the end of a block: a line of every weight, which is there only when all
work is done; and a sample of all that it has learned, because any timed block may be compared."""

import math
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Kinds = dict[str, dict[str, Tensor]]
Tensors = Mapping[str, Tensor]

# Of each kind: 128 KB of weights, and as many of each moment. A thousandth of GPT-2's weights is more.
NUMBERS = 1 << 15

_UNFORESEEN = random.SystemRandom()


class Sample:
    """Elements of every tensor, drawn at random for each block when it is over; all elements of a small tensor.

    A value stands for several elements of its tensor, so it is multiplied by the root of their number. The distance of
    two samples is the distance of the tensors, within a share 1 / sqrt(2 n) where n elements differ alike.
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

    seeds: tuple[int, int]  # the seeds of its batches: before the clock started, and after it
    losses: tuple[float, float]  # the losses of its first step, which is not timed, and of its last step
    sample: Sample  # the elements that were looked at
    left: Kinds  # the values of these elements, by kind


class Lines:
    """One line of every weight of a backend, drawn at random: all elements that differ in their last index alone.

    Reading the lines costs a wait for the device, a view of each weight and one copy to the host: 4 to 6 us of CPU time
    a weight, which is 0.01 % of a block of 250 ms for an MLP of 4 tensors, and 0.3 % for a network of 200 tensors. The
    cost is the same for every entrant, except for ``master_params()`` itself: a backend that keeps weights in another
    form copies all of them, which moves less memory than one update does. If a thread still computes, reading either
    waits for it, or gets weights that change afterwards. The weights that are compared have these lines, too.
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
