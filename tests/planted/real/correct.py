"""Threads on two implementations that differ and are both right: neither may be accused."""

from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.real import networks
from planted.real.norms import norms_of
from planted.real.registry import CORRECT, Theme
from planted.real.settings import LLAMA, LLAMA_LONG, MLP
from torch import Tensor, nn

from mpcompare.backends.master_weights import MasterWeights

RIGHT = Theme(CORRECT)


@RIGHT.plants("NVIDIA/TransformerEngine/issues/1132", LLAMA, "bf16", also="transformers#33133")
class RoundsBeforeTheGain(layers.Patched):
    """transformers rounds what RMSNorm has normed before it multiplies by the gain, TransformerEngine after it."""

    def patch(self, model: Any) -> None:
        for norm in norms_of(model):

            def forward(x: Tensor, norm: Any = norm) -> Tensor:
                normed = torch.rms_norm(x, norm.normalized_shape, None, norm.eps).to(self.compute_dtype)
                return (normed * norm.weight.to(self.compute_dtype)).float()

            norm.forward = forward


@RIGHT.plants("NVIDIA/Megatron-LM/pull/6588", LLAMA, "bf16", also="Megatron-LM#7562 (not found)")
class SquareRoundedOnceMore(layers.Patched):
    """One engine squares in fp32 what relu has left, the other rounds to bf16 before the square and after it."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.activation.forward = lambda x: F.relu(x).bfloat16().float().square().bfloat16()


@RIGHT.plants("pytorch/FBGEMM/pull/786", MLP, "bf16")
class TiesRoundedUp(MasterWeights):
    """FBGEMM rounds to the nearest bf16 number, and the middle between two away from 0; torch to the even one."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        with torch.no_grad():
            for name, p in self.params.items():
                bits = self.masters[name].detach().contiguous().view(torch.int32)
                p.copy_(((bits + 0x8000) & -65536).view(torch.float32))


class _Linear(torch.autograd.Function):
    """A product of 16-bit numbers whose backward pass is one of fp32 numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, low = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(x, low)
        return F.linear(x, low, bias.bfloat16()).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, weight = (t.float() for t in ctx.saved_tensors)
        with torch.autocast("cpu", enabled=False):
            return grad @ weight, grad.t() @ x, grad.sum(0)


@RIGHT.plants("InfiniTensor/InfiniTrain/pull/135", MLP, "bf16")
class BackwardInFp32(layers.Patched):
    """The backward pass of linear layers is computed in fp32 and not in bf16, which is slower, and more exact."""

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, module=module: _Linear.apply(x, module.weight, module.bias)


@RIGHT.plants("KellerJordan/modded-nanogpt/issues/39", LLAMA_LONG, "bf16")
class TablesInBf16(layers.Patched):
    """Cosine and sine of rotary angles that are computed in fp32 are rounded to bf16: one rounding more."""

    def patch(self, model: Any) -> None:
        for block in model.blocks:
            block.attention.rotation = self.rotation

    def rotation(self, length: int, q: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = networks.rotation(length, q.shape[-1], torch.float32)
        return cos.bfloat16().float(), sin.bfloat16().float()
