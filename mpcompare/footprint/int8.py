"""A network for inference with 8-bit weights: linear layers and embeddings hold int8 codes and a scale for each row.

All other layers, biases and norms are bf16. A linear layer makes the bf16 weights from the codes where it needs them,
and drops them after its product; an embedding makes the rows that it looks up.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompare.tasks.cast import cast_wholly
from mpcompare.tasks.copies import copy_of

Codes = dict[int, tuple[Tensor, Tensor]]  # by the id of the weights: int8 [rows, n], bf16 [rows, 1]


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
    model = copy_of(model).requires_grad_(False)
    codes: Codes = {}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(*_codes(child.weight, codes), child.bias))
            elif type(child) is nn.Embedding:
                setattr(module, name, Int8Embedding(*_codes(child.weight, codes)))
    cast_wholly(model, torch.bfloat16)
    return model.eval()


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
