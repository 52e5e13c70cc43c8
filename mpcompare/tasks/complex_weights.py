"""Complex weights, such as the weights of a Fourier neural operator, are trained as pairs of real weights.

An optimizer of torch takes the real and the imaginary part of a weight as two numbers. So a network whose complex
weights are made of two real ones trains as the network itself, and everything else knows real weights only. The parts
of the weight ``w`` are ``parametrizations.w.original0`` and ``original1``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization


class AsComplex(nn.Module):
    """Makes a complex weight of its real and its imaginary part. Torch makes no complex numbers of bf16."""

    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        return torch.complex(real.float(), imaginary.float())

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight.real.contiguous(), weight.imag.contiguous()


def as_real(network: nn.Module) -> None:
    """Makes each complex parameter of a network of two real ones. Tied parameters stay tied."""
    parts: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in list(network.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            if p.is_complex():
                register_parametrization(module, name, AsComplex())
                made: Any = module.get_submodule(f"parametrizations.{name}")
                made.original0, made.original1 = parts.setdefault(id(p), (made.original0, made.original1))
