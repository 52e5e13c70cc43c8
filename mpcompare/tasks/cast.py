"""A module cast to 16 bits by hand: all of it, or all but the layers that sum many numbers, which stay in fp32.

A norm sums the statistics of its inputs, and an embedding sums the gradients of each token.
"""

from typing import Any

import torch
from torch import Tensor, nn

STAY_IN_FP32 = (
    nn.modules.batchnorm._NormBase,  # batch and instance norms
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.Embedding,
    nn.EmbeddingBag,
)


def cast_module(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters and floating buffers to ``dtype`` in place, except those of the layers in ``STAY_IN_FP32``.

    Hooks cast the inputs of these layers to fp32 and their outputs to ``dtype``. Tied parameters stay tied: a weight
    that an embedding shares with a product is cast, because the product needs it in ``dtype``.
    """

    def to_fp32(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)

    def to_16_bits(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.to(dtype)

    owners = [(id(p), isinstance(m, STAY_IN_FP32)) for m in model.modules() for p in m.parameters(recurse=False)]
    kept = {p for p, stays in owners if stays} - {p for p, stays in owners if not stays}
    for module in model.modules():
        if isinstance(module, STAY_IN_FP32):
            module.register_forward_pre_hook(to_fp32)
            module.register_forward_hook(to_16_bits)
            continue
        for p in module.parameters(recurse=False):
            if id(p) not in kept:
                p.data = p.data.to(dtype)
        cast_buffers(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants its weights in one piece


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating buffers of a module, without those of its children, to ``dtype`` in place."""
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            setattr(module, name, buffer.to(dtype))


def cast_wholly(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts all parameters and floating buffers to ``dtype`` in place: ``model.to(dtype)``, tensor by tensor, as
    torch's tensors without data allow."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    for module in model.modules():
        cast_buffers(module, dtype)
