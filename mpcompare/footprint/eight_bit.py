"""Numbers in 8 bits: the moments of an optimizer between its steps, and the weights of a network for inference.

The moments are kept as Dettmers et al. keep them (arXiv 2110.02861). Each block of 256 values has one fp32 scale, the
largest of them, and a byte for each value: 1.016 bytes a value. The codes here lie at equal distances; the paper's lie
closer near 0, in as many bytes. The moments of one parameter at a time are fp32 during its update.

For inference, linear layers and embeddings hold int8 codes and a scale for each row. All other layers, biases and norms
are bf16. A linear layer makes the bf16 weights from the codes where it needs them, and drops them after its product; an
embedding makes the rows that it looks up.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompare.tasks.cast import cast_wholly
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.groups import params_in
from mpcompare.tasks.optimizers import Optimizer

BLOCK = 256  # values that share a scale
SMALLEST = 4096  # elements of a tensor that is quantized; smaller ones stay in fp32, as in bitsandbytes
Codes = dict[int, tuple[Tensor, Tensor]]  # by the id of the weights: int8 [rows, n], bf16 [rows, 1]


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


class Int8Weights(nn.Module):
    """Codes and a scale for each row of them."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    @property
    def weight(self) -> Tensor:
        """The weights in bf16, made anew: torch's transformer layers read them."""
        return self.codes.to(self.scales.dtype) * self.scales


class Int8Linear(Int8Weights):
    """``[..., in]`` to ``[..., out]``, from codes ``[out, in]``."""

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__(codes, scales)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Int8Embedding(Int8Weights):
    """Ids ``[...]`` to ``[..., width]``, from codes ``[ids, width]``."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.codes[ids].to(self.scales.dtype) * self.scales[ids]


def with_int8_weights(model: nn.Module) -> nn.Module:
    """Returns a copy of an fp32 ``model``. Weights that are tied share their codes."""
    holder = nn.Sequential(copy_of(model)).requires_grad_(False)
    codes: Codes = {}
    for module in list(holder.modules()):
        for name, child in module._modules.items():  # a layer that stands twice comes twice
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(*_codes(child.weight, codes), child.bias))
            elif type(child) is nn.Embedding:
                setattr(module, name, Int8Embedding(*_codes(child.weight, codes)))
    cast_wholly(holder, torch.bfloat16)
    return holder[0].eval()


def _codes(weight: Tensor, made: Codes) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of a weight. A tied weight gets the codes that were ``made`` before."""
    if id(weight) not in made:
        scales = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        made[id(weight)] = (weight / scales * 127).round().to(torch.int8), (scales / 127).bfloat16()
    return made[id(weight)]


class Int8Inference:
    """A step that is one forward pass with 8-bit weights, for a batch at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = with_int8_weights(model)
        self.skipped = False

    def train_step(self, batches: Sequence[tuple[Tensor, Tensor]], lr: float | Tensor) -> Tensor:
        """Returns the output for the last of the ``batches``; nothing is trained."""
        with torch.no_grad():
            for x, _ in batches:
                output = self.model(x.bfloat16() if x.is_floating_point() else x)
        return output
