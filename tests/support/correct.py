"""Correct implementations that compute otherwise than ``amp``, and tasks drawn at random: none may be accused."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from support.backends import BACKENDS
from support.tasks import make_task, mlp_of
from torch import Tensor, nn
from torch.func import functional_call

from mpcompare.backends.amp import Amp
from mpcompare.backends.scratch import Scratch
from mpcompare.contract import Backend
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits, synthetic, synthetic_images
from mpcompare.tasks.data.text import ALPHABET, topics
from mpcompare.tasks.images import CifarCnn, MnistCnn
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt, CharLstm, SentimentLstm
from mpcompare.verdict.examine.oracle import MULTIPLY


class PlainProducts(Scratch):
    """``scratch`` whose products are plain fp32 products of widened operands."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale, engine="torch")


class ExplicitCasts(Amp):
    """No autocast: weights and inputs of each product are cast by hand, all else gets fp32."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.multiplied: dict[str, nn.Parameter] = {}
        for name, module in self.model.named_modules():
            own = dict(module.named_parameters(prefix=name, recurse=False))
            if isinstance(module, MULTIPLY):
                self.multiplied |= own
            if own and not isinstance(module, nn.Embedding):
                dtype = self.compute_dtype if isinstance(module, MULTIPLY) else torch.float32
                module.register_forward_pre_hook(partial(_cast, dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = {name: p.to(self.compute_dtype) for name, p in self.multiplied.items()}
        output = functional_call(self.model, weights, (x,), tie_weights=False)
        self.loss = self.task.loss_fn(output.float(), y)
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()


def _cast(dtype: torch.dtype, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(a.to(dtype) for a in args)


class TensorByTensor(Amp):
    """The optimizer updates one tensor after another."""

    foreach = False

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        for group in self.optimizer.param_groups:
            group["foreach"] = self.foreach


class AllTensorsAtOnce(TensorByTensor):
    """The optimizer updates them together, which is not torch's choice on a CPU."""

    foreach = True


class ReversedRows(Amp):
    """The rows of each batch from the last to the first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.flip(0), y.flip(0))


CORRECT: dict[str, type[Backend]] = {
    "master_weights": BACKENDS["master_weights"],
    "casts": ExplicitCasts,
    "foreach=False": TensorByTensor,
    "foreach=True": AllTensorsAtOnce,
    "reversed": ReversedRows,
}
CORRECT_MLPS = {"scratch": BACKENDS["scratch"], "fused": BACKENDS["fused"]}
FAMILIES = ("mlp", "cnn", "lstm", "gpt")


@dataclass(frozen=True)
class Case:
    """What is trained and how.

    Attributes:
        task, dataset, precision, seed, steps: as ``examined`` takes them.
        backends: the correct implementations of it.
    """

    task: Task
    dataset: Dataset
    precision: str
    seed: int
    steps: int
    backends: dict[str, type[Backend]]


def random_task(seed: int) -> Task:
    """An MLP."""
    draw = random.Random(seed)
    return make_task(
        in_features=draw.choice([5, 32, 100, 784]),
        hidden=[draw.choice([3, 16, 64, 200, 300]) for _ in range(draw.randint(0, 4))],
        out_features=draw.choice([2, 10, 33]),
        loss=draw.choice(["cross_entropy", "mse"]),
        batch_size=draw.choice([16, 64, 256, 700]),
        samples=4000,
        lr=draw.choice([0.001, 0.05, 0.3]),
        momentum=draw.choice([0.0, 0.9]),
    )


def mlp_case(seed: int, precision: str) -> Case:
    task = random_task(seed)
    mlp = mlp_of(task)
    dataset = synthetic(seed, task.samples or 0, mlp.in_features, mlp.out_features, str(task.loss))
    return Case(task, dataset, precision, seed, 20, CORRECT_MLPS)


def unstable_case(seed: int, precision: str) -> Case:
    """An MLP whose learning rate is too large: losses go up, gradients overflow."""
    draw = random.Random(seed)
    task = make_task(
        in_features=784,
        hidden=[draw.choice([3, 5, 17, 33, 64, 128]) for _ in range(draw.randint(1, 4))],
        out_features=10,
        batch_size=draw.choice([32, 128, 257]),
        samples=2570,
        lr=draw.choice([0.3, 0.5, 1.0]),
        momentum=draw.choice([0.0, 0.9, 0.95]),
    )
    backends = {**CORRECT_MLPS, "plain products": PlainProducts}
    return Case(task, digits(seed, 2570), precision, seed, draw.choice([20, 43, 60]), backends)


def cnn_case(seed: int, precision: str) -> Case:
    draw = random.Random(seed)
    batch = draw.choice([8, 16, 33, 64])
    if draw.random() < 0.7:
        model: Callable[[], nn.Module] = partial(MnistCnn, draw.choice([2, 4, 6, 8]))
        dataset = digits(seed, 640)
    else:
        model = partial(CifarCnn, draw.choice([2, 4]))
        dataset = part(synthetic_images(seed, 320), 320)
        batch = min(batch, 16)
    optimizer = Sgd(draw.choice([0.01, 0.05, 0.2]), draw.choice([0.0, 0.9]))
    return Case(Task(model, "cross_entropy", optimizer, batch), dataset, precision, seed, 12, CORRECT)


def lstm_case(seed: int, precision: str) -> Case:
    draw = random.Random(seed)
    length = draw.choice([8, 16, 32])
    width, layers = draw.choice([8, 24, 48]), draw.choice([1, 2])
    model: Callable[[], nn.Module] = partial(CharLstm, len(ALPHABET), width, layers)
    dataset = part(topics(seed, length), 960)
    if draw.random() < 0.3:
        model = partial(SentimentLstm, len(ALPHABET), width)
        dataset = Dataset(
            "lines",
            "",
            *(
                t if t.dim() == 2 and i % 2 == 0 else t[:, 0] % 2
                for i, t in enumerate((dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test))
            ),
        )
    optimizer = Sgd(draw.choice([0.05, 0.3, 1.0]), draw.choice([0.0, 0.9]))
    task = Task(model, "cross_entropy", optimizer, draw.choice([8, 16, 33, 64]))
    return Case(task, dataset, precision, seed, 12, CORRECT)


def gpt_case(seed: int, precision: str) -> Case:
    draw = random.Random(seed)
    length, heads = draw.choice([8, 16, 32]), draw.choice([1, 2, 4])
    width = heads * draw.choice([4, 8, 16])
    model = partial(CharGpt, len(ALPHABET), length, width, heads, draw.choice([1, 2, 3]), draw.random() < 0.3)
    optimizer = Sgd(draw.choice([0.01, 0.1, 0.3]), draw.choice([0.0, 0.9]))
    task = Task(model, "cross_entropy", optimizer, draw.choice([8, 16, 33, 64]))
    return Case(task, part(topics(seed, length), 960), precision, seed, 12, CORRECT)


def part(dataset: Dataset, samples: int) -> Dataset:
    return Dataset(dataset.name, dataset.reason, dataset.x_train[:samples], dataset.y_train[:samples],
                   dataset.x_test[:64], dataset.y_test[:64])  # fmt: skip


CASES: dict[str, Callable[[int, str], Case]] = {
    "mlp": mlp_case, "unstable": unstable_case, "cnn": cnn_case, "lstm": lstm_case, "gpt": gpt_case,
}  # fmt: skip
