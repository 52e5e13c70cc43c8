"""Real bugs of normalization layers."""

from typing import Any

import torch
from planted import layers
from planted.real.registry import Theme
from planted.real.settings import GEMMA, GPT, LLAMA, LLAMA_OUTLIER, LLAMA_SMALL
from torch import Tensor, nn

NORMS = Theme("norms")
WRONG = "normalization, forward pass"


def norms_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, (nn.RMSNorm, nn.LayerNorm))]


class SquaresIn16Bits(layers.Patched):
    """RMSNorm squares in 16 bits, and takes their mean and its root in 16 bits."""

    def patch(self, model: Any) -> None:
        for norm in norms_of(model):
            norm.forward = lambda x, norm=norm: self.normed(norm, x.to(self.compute_dtype))

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.to(x.dtype)


NORMS.plants("young-geng/EasyLM/pull/50", LLAMA_OUTLIER, "fp16", fair=WRONG)(SquaresIn16Bits)
NORMS.plants("Lightning-AI/lightning-thunder/issues/1713", LLAMA, "bf16", fair=WRONG)(SquaresIn16Bits)


@NORMS.plants("pytorch/pytorch/issues/189581", LLAMA_SMALL, "bf16", fair=WRONG)
class EpsOfTheInput(layers.Patched):
    """The default eps of RMSNorm was that of the input's dtype, 2^-7 in bf16: too large for an input of 0.058."""

    def patch(self, model: Any) -> None:
        for norm in norms_of(model):
            norm.eps = torch.finfo(self.compute_dtype).eps


@NORMS.plants("linkedin/Liger-Kernel/pull/1462", GEMMA, "bf16", fair=WRONG)
class OffsetAddedInBf16(layers.Patched):
    """The 1 of Gemma's norm is added to its weight in bf16, which rounds 1.0039 to 1."""

    def patch(self, model: Any) -> None:
        norm = model.norm

        def forward(x: Tensor) -> Tensor:
            offset = (1 + norm.weight.to(self.compute_dtype)).float()
            return torch.rms_norm(x, norm.normalized_shape, None, norm.eps) * offset

        norm.forward = forward


class VarianceInFp16(layers.Patched):
    """LayerNorm adds eps to the variance, and rounds the sum to fp16 before it takes the root."""

    def patch(self, model: Any) -> None:
        for norm in norms_of(model):
            norm.forward = lambda x, norm=norm: self.normed(norm, x.float())

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred.square().mean(-1, keepdim=True) + norm.eps).to(self.compute_dtype)
        return centred * torch.rsqrt(variance).float() * norm.weight + norm.bias


NORMS.plants("deepspeedai/DeepSpeed/issues/581", GPT, "fp16", fair=WRONG)(VarianceInFp16)


@NORMS.plants("apache/mxnet/issues/14073", GPT, "fp16", fair=WRONG, also="fairseq#335, pytorch#66707")
class SumsInFp16(layers.Patched):
    """LayerNorm adds up mean and variance in fp16, number after number."""

    def patch(self, model: Any) -> None:
        for norm in norms_of(model):
            norm.forward = lambda x, norm=norm: self.normed(norm, x.to(self.compute_dtype))

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        centred = x - mean_one_by_one(x)
        scaled = centred * torch.rsqrt(mean_one_by_one(centred.square()) + norm.eps)
        return scaled * norm.weight.to(x.dtype) + norm.bias.to(x.dtype)


def mean_one_by_one(x: Tensor) -> Tensor:
    """Returns the mean over the last dimension, whose sum is rounded after each number."""
    total = torch.zeros_like(x[..., 0])
    for column in x.unbind(-1):
        total = total + column
    return (total / x.shape[-1]).unsqueeze(-1)
