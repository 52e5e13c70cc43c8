"""The settings of the second draw of real bugs that the first draw does not have."""

from dataclasses import replace
from functools import partial

from planted.real.networks import batch_norm_mlp
from planted.real.registry import Setting
from planted.real.settings import BASE, MLP, TOO_LARGE, on_digits, regression
from torch import nn

from mpcompare.loss_scale import DynamicLossScale
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.schedules import Cosine
from mpcompare.tasks.task import Task


def tanh_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10))


def huge_regression() -> tuple[Task, Dataset]:
    """Returns a task some elements of whose gradients are beyond 65504, the largest fp16 number."""
    task, data = regression()
    return task, replace(data, y_train=data.y_train * 200, y_test=data.y_test * 200)


def bright_digits() -> tuple[Task, Dataset]:
    """Returns digits that are eight times brighter, so that tanh comes near 1."""
    task, data = on_digits(replace(BASE, model=tanh_mlp))
    return task, replace(data, x_train=data.x_train * 8, x_test=data.x_test * 8)


def shifted_digits() -> tuple[Task, Dataset]:
    """Returns digits that are brighter by 5 everywhere: what is normed has a mean of many times its spread."""
    task, data = on_digits(replace(BASE, model=batch_norm_mlp))
    return task, replace(data, x_train=data.x_train + 5, x_test=data.x_test + 5)


MLP_ADAMW_COSINE_SKIPS = MLP.changed(
    "AdamW, cosine, scale from 2^24",
    scaling=TOO_LARGE,
    optimizer=AdamW(1e-3, weight_decay=0.01),
    schedule=Cosine(),
)
MLP_MOMENTUM_65536 = MLP.changed("momentum", optimizer=Sgd(0.05, 0.9))
MLP_PLAIN_DECAY = MLP.changed("no momentum, decay 1e-4", optimizer=Sgd(0.05, weight_decay=1e-4))
MLP_ADAM_DECAY = MLP.changed("Adam, decay 0.01", optimizer=Adam(1e-3, weight_decay=0.01))
MLP_WARMUP_COSINE = MLP.changed("warm-up of 4 steps, then cosine", schedule=Cosine(warmup_steps=4))
TANH = Setting("MLP with tanh, digits x 8", bright_digits)
REGRESSION_HUGE = Setting("regression beyond fp16, clip 1", huge_regression, scaling=DynamicLossScale(1.0))
BATCH_NORM_BF16 = Setting("batch norm", partial(on_digits, replace(BASE, model=batch_norm_mlp)))
BATCH_NORM_SHIFTED = Setting("batch norm, digits + 5", shifted_digits)
