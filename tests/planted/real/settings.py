"""The settings in which real bugs show. Optimizers have the values that their threads or libraries have by default."""

from dataclasses import replace
from functools import partial

from planted.real.networks import VOCABULARY, OffsetGpt, RotaryGpt, RoutedGpt, batch_norm_mlp, policy_loss, tokens
from planted.real.registry import Setting
from support.tasks import make_task

from mpcompare.loss_scale import DynamicLossScale, NoLossScale
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits, synthetic
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.schedules import Cosine
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt

ROWS, STEPS = 128, 12
BASE = make_task(in_features=784, hidden=[64], out_features=10, batch_size=ROWS, samples=ROWS * STEPS, lr=0.05)


def on_digits(task: Task) -> tuple[Task, Dataset]:
    return task, digits(0, ROWS * STEPS)


def regression() -> tuple[Task, Dataset]:
    """Returns a task whose gradients have a norm of about 5000, and elements that fp16 holds."""
    task = make_task(in_features=64, hidden=[64], out_features=16, loss="mse", batch_size=ROWS, lr=0.01)
    data = synthetic(0, ROWS * STEPS, 64, 16, "mse")
    return replace(task, clip_norm=1.0), replace(data, y_train=data.y_train * 2.2e4, y_test=data.y_test * 2.2e4)


def with_a_huge_row() -> tuple[Task, Dataset]:
    """Returns digits with one image that is a hundred thousand times brighter, which overflows in fp16."""
    task, data = on_digits(replace(BASE, model=batch_norm_mlp))
    x = data.x_train.clone()
    x[4 * ROWS] *= 1e5
    return task, replace(data, x_train=x)


def on_tokens(model: object, rows: int = 32, length: int = 24) -> tuple[Task, Dataset]:
    return Task(model, "cross_entropy", Sgd(0.1, 0.9), rows), tokens(rows * STEPS, length)  # type: ignore[arg-type]


TOO_LARGE = DynamicLossScale(2.0**24)  # the first steps overflow until it has backed off
ADAMW_DEFAULT = AdamW(1e-3, weight_decay=0.01)

MLP = Setting("MLP", partial(on_digits, BASE))
MLP_MOMENTUM = MLP.changed("momentum, scale from 2^24", scaling=TOO_LARGE, optimizer=Sgd(0.05, 0.9))
MLP_GROWS = MLP.changed("scale from 4, doubled each step", scaling=DynamicLossScale(4.0, growth_interval=1))
MLP_ADAMW = MLP.changed("AdamW", optimizer=ADAMW_DEFAULT)
MLP_ADAMW_095 = MLP.changed("AdamW, beta2 0.95", optimizer=AdamW(1e-3, (0.9, 0.95), weight_decay=0.01))
MLP_ADAMW_EPS = MLP.changed("AdamW, eps 1e-6", optimizer=AdamW(1e-3, eps=1e-6, weight_decay=0.01))
MLP_ADAMW_LONG = MLP.changed("AdamW, 300 steps", steps=300, optimizer=ADAMW_DEFAULT)
MLP_ADAM = MLP.changed("Adam", optimizer=Adam(1e-3))
MLP_DECAY = MLP.changed("momentum, decay 1e-4", optimizer=Sgd(0.05, 0.9, weight_decay=1e-4))
MLP_CLIP = MLP.changed("clip 0.5", clip_norm=0.5)
MLP_CLIP_ACCUMULATE = MLP.changed("clip 0.5, 4 micro-batches", clip_norm=0.5, accumulate=4)
MLP_ACCUMULATE = MLP.changed("4 micro-batches", accumulate=4)
MLP_ACCUMULATE_2 = MLP.changed("2 micro-batches", accumulate=2)
MLP_ACCUMULATE_32 = MLP.changed("32 micro-batches", accumulate=32)
MLP_COSINE = MLP.changed("cosine", schedule=Cosine())
MLP_COSINE_SKIPS = MLP.changed("cosine, scale from 2^24", scaling=TOO_LARGE, schedule=Cosine())
MLP_COSINE_ACCUMULATE = MLP.changed("cosine, 4 micro-batches", schedule=Cosine(), accumulate=4)
MLP_POLICY = MLP.changed("policy gradient", loss=policy_loss)

REGRESSION = Setting("regression, clip 1", regression, scaling=DynamicLossScale(1.0))
BATCH_NORM = Setting("batch norm, an image that overflows", with_a_huge_row)

GPT = Setting("GPT", partial(on_tokens, partial(CharGpt, VOCABULARY, 24, 32, 4, 2)))
GPT_ADAMW = GPT.changed("AdamW", optimizer=AdamW(1e-4, weight_decay=0.01))
GPT_ADAM_UNSCALED = GPT.changed("Adam, no loss scale", scaling=NoLossScale(), optimizer=Adam(1e-3))

LLAMA = Setting("LLaMA", partial(on_tokens, RotaryGpt))
LLAMA_OUTLIER = Setting("LLaMA, a channel of 1000", partial(on_tokens, partial(RotaryGpt, outlier=1000.0)))
LLAMA_SMALL = Setting("LLaMA, embedding of 0.058", partial(on_tokens, partial(RotaryGpt, spread=0.058)))
LLAMA_LONG = Setting("LLaMA, 320 tokens", partial(on_tokens, partial(RotaryGpt, blocks=1), rows=4, length=320))
GEMMA = Setting("Gemma", partial(on_tokens, OffsetGpt))
ROUTED = Setting("router", partial(on_tokens, RoutedGpt, rows=ROWS))
