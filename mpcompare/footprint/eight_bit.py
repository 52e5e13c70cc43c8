"""An optimizer whose moments are 8-bit numbers between steps, as Dettmers et al. keep them (arXiv 2110.02861).

Each block of 256 values has one fp32 scale, the largest of them, and a byte for each value: 1.016 bytes a value. The
codes here lie at equal distances; the paper's codes lie closer near 0, in as many bytes. The moments of one parameter
at a time are fp32 during its update.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompare.tasks.groups import params_in
from mpcompare.tasks.optimizers import Optimizer

BLOCK = 256  # values that share a scale
SMALLEST = 4096  # elements of a tensor that is quantized; smaller ones stay in fp32, as in bitsandbytes


class Quantized:
    """A tensor as 8-bit codes ``[blocks, 256]`` and fp32 scales ``[blocks, 1]``."""

    def __init__(self, values: Tensor) -> None:
        self.shape, self.size = values.shape, values.numel()
        blocks = -(-self.size // BLOCK)
        self.codes = torch.empty(blocks, BLOCK, dtype=torch.int8, device=values.device)
        self.scales = torch.empty(blocks, 1, device=values.device)
        self.store(values)

    def store(self, values: Tensor) -> None:
        """Replaces the codes and scales by the codes and scales of ``values``."""
        padded = F.pad(values.flatten(), (0, self.codes.numel() - self.size)).view_as(self.codes)
        self.scales.copy_(padded.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny))
        self.codes.copy_((padded / self.scales).mul_(127).round_())

    def values(self) -> Tensor:
        """Returns the numbers that the codes stand for, fp32."""
        return self.codes.float().mul_(self.scales / 127).flatten()[: self.size].view(self.shape)


class EightBitMoments(torch.optim.Optimizer):
    """Takes the updates of ``rule``, one parameter at a time; between updates the state is :class:`Quantized`."""

    def __init__(self, params: Iterable[nn.Parameter], rule: Optimizer) -> None:
        super().__init__(list(params), {"lr": rule.lr})
        self._rules = [(p, rule.make([p])) for p in params_in(self)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so no loss
        """Updates every parameter that has a gradient."""
        for p, rule in self._rules:
            if p.grad is None:
                continue
            rule.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            kept = self.state[p]
            rule.state[p] = {kind: v.values() if isinstance(v, Quantized) else v for kind, v in kept.items()}
            rule.step()
            for kind, value in rule.state.pop(p).items():
                if isinstance(kept.get(kind), Quantized):
                    kept[kind].store(value)
                else:
                    is_large = isinstance(value, Tensor) and value.numel() >= SMALLEST
                    kept[kind] = Quantized(value) if is_large else value
