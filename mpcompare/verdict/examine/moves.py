"""How far each training step moves the weights: a digest that costs next to nothing, taken between steps.

Some elements of each tensor are copied after every step, the same elements in every run. Nothing waits for the copies:
the numbers stay on the device until training is over.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.numerics import spreads
from mpcompare.verdict.judge.moves import Moves

ELEMENTS = 1 << 12  # the number of elements of each tensor that are copied
NUMBERS = 1 << 16  # the most norms of single tensors that are kept, so that the record of a long training stays small


class Digest:
    """Looks at the weights of a backend before its first step, and after each."""

    def __init__(self, backend: Any, dtype: torch.dtype) -> None:
        """``dtype`` is the format in which the backend computes."""
        self.backend, self.dtype = backend, dtype
        some = self._some()
        self.names, lengths = list(some), torch.tensor(list(map(len, some.values())))
        self.before = torch.cat(list(some.values())).float()
        self.owners = torch.repeat_interleave(lengths).to(self.before.device)
        self.norms: list[Tensor] = []  # the norm of each tensor's change in a step
        self.short: list[Tensor] = []
        self.largest = self._norms(self.before)

    def take(self) -> None:
        """Looks at the weights after a step."""
        some = self._some()
        weights = torch.cat([some[name] for name in self.names]).float()
        self.norms.append(self._norms(weights.sub(self.before)))
        short = weights.to(self.dtype).to(weights.dtype) == weights
        # A weight that was 0 is lr g now: 0.05 times a 16-bit g is as short as g / 20 in one of five cases.
        self.short.append((short & (self.before != 0) & (weights != 0) & weights.isfinite()).sum())
        self.largest = torch.maximum(self.largest, self._norms(weights))
        self.before = weights

    def moves(self) -> Moves:
        """Returns what was seen, and waits for the device."""
        norms = torch.stack(self.norms).cpu() if self.norms else torch.zeros(0, len(self.names))
        few = norms[: max(1, NUMBERS // len(self.names))]
        return Moves(
            steps=_rounded(torch.linalg.vector_norm(norms, dim=1)),
            tensors={name: _rounded(few[:, number]) for number, name in enumerate(self.names)},
            weights=dict(zip(self.names, _rounded(self.largest.cpu()), strict=True)),
            short=[int(count) for count in self.short],
        )

    def _some(self) -> Params:
        return spreads(self.backend.master_params(), ELEMENTS)

    def _norms(self, values: Tensor) -> Tensor:
        sums = torch.zeros(len(self.names), dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self.owners, values.double().square_()).sqrt_()


def _rounded(values: Tensor) -> list[float]:
    """Returns the values with five digits, which a limit allows for."""
    return [float(f"{value:.5g}") if math.isfinite(value) else value for value in values.tolist()]
