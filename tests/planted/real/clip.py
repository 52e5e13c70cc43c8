"""Real bugs of clipping."""

import copy

import torch
from planted.real.registry import Theme
from planted.real.settings import MLP_CLIP, MLP_CLIP_ACCUMULATE, REGRESSION
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.real_bugs import ClipsEachMicroBatch, ClipsOtherTensors, ClipsScaledGradients

CLIP = Theme("clip")

CLIP.plants(
    "Lightning-AI/pytorch-lightning/issues/9330",
    MLP_CLIP,
    "fp16",
    fair="clip",
    name="Lightning#9330",
    also="TorchSSL#59, allennlp#5426, nntrainer#2749, miles-credit#141, waifu-diffusion#64",
)(ClipsScaledGradients)
CLIP.plants("NVIDIA/Megatron-LM/pull/7074", MLP_CLIP, "bf16", fair="clip", also="NeMo-RL#1158")(ClipsOtherTensors)
CLIP.plants("tenstorrent/tt-metal/issues/17568", MLP_CLIP_ACCUMULATE, "bf16", fair="clip, accumulation")(
    ClipsEachMicroBatch
)


class OwnNorm(MasterWeights):
    """Clips all gradients by a norm of its own."""

    def clip(self) -> None:
        grads = self.grads()
        self.grad_norm = self.norm(list(grads.values()))
        factor = ((self.task.clip_norm or 0.0) / (self.grad_norm + 1e-6)).clamp(max=1.0)
        for g in grads.values():
            g.mul_(factor)

    def norm(self, grads: list[Tensor]) -> Tensor:
        """Returns the norm of all gradients together."""
        raise NotImplementedError


@CLIP.plants("facebookresearch/fairscale/pull/263", REGRESSION, "fp16", fair="clip, gradient missing", also="burn#5699")
class SquaresInFp16(OwnNorm):
    """Norms of tensors are squared in fp16, which holds none above 256^2: the norm is inf, and the factor 0."""

    def norm(self, grads: list[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(g.to(self.compute_dtype)) for g in grads]
        return sum((norm**2 for norm in norms), torch.zeros((), dtype=self.compute_dtype)) ** 0.5


@CLIP.plants("yandex-research/tabm/issues/20", MLP_CLIP, "bf16", fair="clip")
class ClipsBeforeBackward(Amp):
    """Gradients are clipped before the backward pass makes them."""

    def backward(self) -> None:
        parameters = self.model.parameters()
        self.grad_norm = nn.utils.clip_grad_norm_(parameters, self.task.clip_norm or 0.0, self.task.clip_norm_type)
        super().backward()

    def clip(self) -> None:
        pass


@CLIP.plants("facebookresearch/fairscale/issues/1092", MLP_CLIP, "bf16", fair="clip", also="Automodel#825")
class NormInBf16(OwnNorm):
    """The norm is cast to the dtype of the parameters before it is used: 724.0, 728.0, 716.0."""

    def norm(self, grads: list[Tensor]) -> Tensor:
        norms = torch.stack([torch.linalg.vector_norm(g) for g in grads])
        return torch.linalg.vector_norm(norms).to(self.compute_dtype).float()


@CLIP.plants("deepspeedai/DeepSpeed/pull/2695", MLP_CLIP, "fp16", fair="clip, loss scale, gradient scaled")
class NormByTheNextScale(MasterWeights):
    """The norm that ZeRO reports is divided by the scale that comes after the update of the scale."""

    def clip(self) -> None:
        super().clip()
        following = copy.deepcopy(self.scaling)
        following.update(self.found_inf)
        norm = self.grad_norm
        self.grad_norm = norm * (self.scaling.scale / following.scale) if isinstance(norm, Tensor) else norm
