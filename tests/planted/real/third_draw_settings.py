"""The settings of the third draw of real bugs that the first two draws do not have, their networks and losses."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from planted.real.networks import VOCABULARY, tokens
from planted.real.registry import Setting
from planted.real.settings import ADAMW_DEFAULT, BASE, GPT, MLP, ROWS, STEPS, on_digits, on_tokens
from support.branches import Branches, branched
from support.networks import DroppingGpt
from torch import Tensor, nn

from mpcompare.tasks.data import Dataset
from mpcompare.tasks.groups import Group
from mpcompare.tasks.losses import MaskedCrossEntropy
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.schedules import Cosine, Warmup
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt

SHAPE = (VOCABULARY, 24, 32, 4, 2)  # the arguments of the small GPT


class QuickGelu(nn.Module):
    """GELU as ``x sigmoid(1.702 x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def quick_gpt() -> CharGpt:
    model = CharGpt(*SHAPE)
    for block in model.blocks:
        block.gelu = QuickGelu()
    return model


def conv_net() -> nn.Module:
    """Returns a convolution with a bias and no norm after it, and a linear layer."""
    return nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 196, 10))


def batch_norm_net() -> nn.Module:
    """Returns an MLP with batch norm whose eps is 0.001."""
    norm = nn.BatchNorm1d(64, eps=1e-3)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64, bias=False), norm, nn.ReLU(), nn.Linear(64, 10))


def overflowing_digits() -> tuple[Task, Dataset]:
    """Returns digits with one image that is a hundred thousand times brighter, which overflows in fp16."""
    task, data = on_digits(BASE)
    x = data.x_train.clone()
    x[4 * ROWS] *= 1e5
    return task, replace(data, x_train=x)


def in_branches() -> tuple[Task, Dataset]:
    """Returns a network with two heads, of which each batch uses one."""
    model = partial(Branches, 16, 32, 10, 2)
    return Task(model, "cross_entropy", Adam(1e-3), 32), branched(0, 32 * STEPS, 16, 10, 32, [0, 1])


def with_prompts(loss: object = "masked_cross_entropy") -> tuple[Task, Dataset]:
    """Returns tokens the first 0 to 20 of which, in each row another number, are left out of the loss."""
    task, _ = on_tokens(partial(CharGpt, *SHAPE))
    data = tokens(32 * STEPS, 24)
    lengths = torch.randint(21, (len(data.y_train), 1), generator=torch.Generator().manual_seed(1))
    y = data.y_train.masked_fill(torch.arange(24) < lengths, MaskedCrossEntropy.ignored)
    masked = replace(data, y_train=y, y_test=y[:16])
    return replace(task, loss=loss), masked  # type: ignore[arg-type]


SMOOTHING = 0.1


def smoothed(output: Tensor, y: Tensor) -> Tensor:
    """Returns the mean cross-entropy with smoothed labels, over the labels that are not left out."""
    logits = output.to(torch.promote_types(output.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(logits, y.flatten(), label_smoothing=SMOOTHING)


MLP_OVERFLOW = Setting("MLP, an image that overflows", overflowing_digits)
MLP_ADAMW_WARMUP = MLP.changed(
    "AdamW, warm-up of 4 steps, then cosine", optimizer=ADAMW_DEFAULT, schedule=Cosine(warmup_steps=4)
)
MLP_TWO_RATES = MLP.changed(
    "two learning rates, warm-up of 4 steps",
    optimizer=Sgd(0.05, 0.9, groups=(Group(match=("layer2.*",), lr_factor=0.1),)),
    schedule=Warmup(4),
)
MLP_NESTEROV = MLP.changed("Nesterov, decay 5e-4", optimizer=Sgd(0.05, 0.9, nesterov=True, weight_decay=5e-4))
CONV = Setting("convolution", partial(on_digits, replace(BASE, model=conv_net, batch_size=32)))
BATCH_NORM_EPS = Setting("batch norm, eps 0.001", partial(on_digits, replace(BASE, model=batch_norm_net)))
BRANCHES = Setting("branches, Adam", in_branches)

NO_DECAY = AdamW(1e-3, weight_decay=0.1, groups=(Group(kind="vectors", weight_decay=0.0),))
GPT_NO_DECAY = GPT.changed("AdamW, no decay of norms and biases", optimizer=NO_DECAY)
GPT_TIED = Setting("GPT, tied", partial(on_tokens, partial(CharGpt, *SHAPE, tied=True))).changed(
    "AdamW", optimizer=ADAMW_DEFAULT
)
GPT_DROPOUT = Setting("GPT, dropout 0.1", partial(on_tokens, partial(DroppingGpt, SHAPE, 0.1)))
GPT_QUICK = Setting("GPT, quick GELU", partial(on_tokens, quick_gpt))
MASKED = Setting("GPT, masked labels", with_prompts)
MASKED_ACCUMULATE = MASKED.changed("4 micro-batches", accumulate=4)
MASKED_SMOOTHED = Setting("GPT, masked labels, smoothed", partial(with_prompts, smoothed))
