"""The settings of the fifth draw of real bugs that the first four draws do not have, and their losses."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from planted.real import fifth_draw_networks as networks
from planted.real.registry import Setting
from planted.real.settings import BASE, GPT_ADAMW, MLP, on_digits, on_tokens
from support.networks import DroppingGpt
from torch import Tensor

from mpcompare.tasks.images import MnistCnn

SMOOTHING, CLASS_WEIGHTS = 0.1, 1 + torch.arange(10) / 4


def rows_of(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits ``[rows, classes]``, in fp32 or more, and classes ``[rows]``."""
    return output.to(torch.promote_types(output.dtype, torch.float32)).flatten(0, -2), y.flatten()


def smoothed(output: Tensor, y: Tensor) -> Tensor:
    """Returns the mean cross-entropy with smoothed labels."""
    return F.cross_entropy(*rows_of(output, y), label_smoothing=SMOOTHING)


def focal(output: Tensor, y: Tensor) -> Tensor:
    """Returns the mean focal loss, ``-(1 - p)^2 log p`` of the true class."""
    log_p = -F.cross_entropy(*rows_of(output, y), reduction="none")
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


def by_class(output: Tensor, y: Tensor) -> Tensor:
    """Returns the cross-entropy as a mean over rows in which each class has its weight."""
    logits, y = rows_of(output, y)
    return F.cross_entropy(logits, y, CLASS_WEIGHTS.to(logits))


def weight_of(y: Tensor) -> Tensor:
    """Returns the weight of each token: an even one counts half as much as an odd one."""
    return 0.5 + 0.5 * (y % 2)


def weighted(output: Tensor, y: Tensor) -> Tensor:
    """Returns the mean over all tokens of their weight times their cross-entropy."""
    logits, y = rows_of(output, y)
    return (weight_of(y).to(logits) * F.cross_entropy(logits, y, reduction="none")).mean()


def images(name: str, model: object) -> Setting:
    return Setting(name, partial(on_digits, replace(BASE, model=model, batch_size=32)))  # type: ignore[arg-type]


CNN = images("CNN", partial(MnistCnn, 8))
CNN_FOCAL = CNN.changed("focal loss", loss=focal)
GROUP_NORM = images("CNN with group norm", networks.group_norm_net)
GROUPED = images("grouped convolution", networks.grouped_net)
POOLING = images("CNN, windows that overlap", networks.pooling_net)
VIT = images("ViT", networks.Vit)

TURNING = MLP.changed("leaky ReLU of slope -2", model=networks.turning_mlp)
MLP_SMOOTHED = MLP.changed("smoothed labels", loss=smoothed)
MLP_FOCAL = MLP.changed("focal loss", loss=focal)
MLP_BY_CLASS = MLP.changed("weighted classes", loss=by_class)

GATED = Setting("LLaMA, SwiGLU", partial(on_tokens, networks.gated_gpt))
GATED_WEIGHTED = GATED.changed("weighted tokens", loss=weighted)
GATED_SMALL = Setting("LLaMA, SwiGLU, embedding of 0.02", partial(on_tokens, partial(networks.gated_gpt, spread=0.02)))
WIDE_VALUES = Setting("LLaMA, SwiGLU, wide values", partial(on_tokens, partial(networks.gated_gpt, wide_values=True)))
CAPPED = Setting("LLaMA, capped logits", partial(on_tokens, networks.capped_gpt))
BIASED = Setting("GPT, ALiBi", partial(on_tokens, networks.biased_gpt))
TANH_GPT = Setting("GPT, GELU with tanh", partial(on_tokens, networks.tanh_gpt))
EXPERTS = Setting("GPT, experts", partial(on_tokens, networks.experts_gpt))
GPT_ACCUMULATE = GPT_ADAMW.changed("4 micro-batches", accumulate=4)
GPT_ATTENTION_DROPOUT = Setting(
    "GPT, dropout 0.1 in attention", partial(on_tokens, partial(DroppingGpt, networks.SHAPE, 0.1, functions=True))
)
