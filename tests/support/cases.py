"""Tasks drawn at random, with correct implementations of their training: none may be accused."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from support.branches import Branches, branched
from support.correct import BY_HAND, CORRECT, CORRECT_MLPS, PEERS, TORCH_MODELS, PlainProducts
from support.networks import DroppingCnn, DroppingGpt, DroppingLstm
from support.tasks import make_task, mlp_of, part
from torch import nn

from mpcompare.contract import Backend
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits, synthetic, synthetic_images
from mpcompare.tasks.data.text import ALPHABET, topics
from mpcompare.tasks.images import CifarCnn, MnistCnn
from mpcompare.tasks.mlp import Mlp
from mpcompare.tasks.optimizers import Adam, AdamW, Optimizer, Sgd
from mpcompare.tasks.schedules import Constant, Cosine, Schedule, Warmup
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt, CharLstm, SentimentLstm


@dataclass(frozen=True)
class Case:
    """A training that several backends may do.

    Attributes:
        task, dataset, precision, seed, steps: the arguments of ``examined``.
        backends: correct implementations by their names.
    """

    task: Task
    dataset: Dataset
    precision: str
    seed: int
    steps: int
    backends: dict[str, type[Backend]]


def random_task(seed: int) -> Task:
    """Returns the task of an MLP."""
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
    """Draws an MLP whose learning rate is too large: losses go up, and gradients overflow."""
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


def dropout_case(seed: int, precision: str) -> Case:
    """Draws a network with dropout, by modules or by functions, some of whose activations are computed again."""
    draw = random.Random(seed)
    p, batch = draw.choice([0.1, 0.3, 0.5]), draw.choice([8, 16, 33])
    kind = draw.choice(["gpt", "gpt", "gpt", "cnn", "lstm"])
    again = kind != "lstm" and draw.random() < 0.6
    dataset = digits(seed, 640)
    if kind == "cnn":
        model: Callable[[], nn.Module] = partial(DroppingCnn, draw.choice([2, 4, 8]), p, again)
    else:
        length, heads = draw.choice([8, 16, 32]), draw.choice([1, 2, 4])
        dataset, width = part(topics(seed, length), 640), heads * draw.choice([4, 8])
        shape = (len(ALPHABET), length, width, heads, draw.choice([1, 2, 3]))
        reentrant = draw.choice([False, True]) if again else None
        model = partial(DroppingGpt, shape, p, draw.random() < 0.5, reentrant)
        if kind == "lstm":
            model = partial(DroppingLstm, len(ALPHABET), width, p)
    accumulate = draw.choice([1, 1, 2]) if batch % 2 == 0 else 1
    optimizer = draw.choice([Sgd(0.1, 0.9), Sgd(0.05), AdamW(1e-3)])
    task = Task(model, "cross_entropy", optimizer, batch, accumulate=accumulate, clip_norm=draw.choice([None, 1.0]))
    precision = precision if kind == "gpt" else "bf16"
    # Masks fall on other rows where these are reversed, and explicit casts do not reach what is computed again.
    left_out = {"reversed", "casts"} if again else {"reversed"}
    backends = {name: each for name, each in TORCH_MODELS.items() if name not in left_out}
    return Case(task, dataset, precision, seed, 12, backends)


def random_optimizer(draw: random.Random) -> Optimizer:
    decay = draw.choice([0.0, 1e-4, 0.01, 0.1])
    kind = draw.choice(["sgd", "momentum", "nesterov", "adam", "adamw"])
    if kind in ("adam", "adamw"):
        betas = draw.choice([(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.0, 0.99), (0.9, 0.0)])
        return (Adam if kind == "adam" else AdamW)(
            draw.choice([1e-4, 1e-3, 1e-2]), betas, draw.choice([1e-8, 1e-6]), decay
        )
    momentum = 0.0 if kind == "sgd" else draw.choice([0.5, 0.9])
    return Sgd(draw.choice([0.001, 0.05, 0.3]), momentum, kind == "nesterov", decay)


def random_schedule(draw: random.Random) -> Schedule:
    warmup = draw.randint(0, 6)
    return draw.choice([Constant(), Warmup(draw.randint(1, 10)), Cosine(None, warmup, draw.choice([0.0, 0.1]))])


def random_network(draw: random.Random, seed: int) -> tuple[str, Callable[[], nn.Module], str, Dataset]:
    """Returns the family of a network, its factory, its loss and its data."""
    family = draw.choice(["mlp", "mlp", "mlp", "mlp", "cnn", "cnn", "lstm", "gpt"])
    loss = "cross_entropy"
    if family == "cnn":
        return family, partial(MnistCnn, draw.choice([2, 4])), loss, digits(seed, 640)
    if family == "lstm":
        width = draw.choice([8, 24])
        return family, partial(CharLstm, len(ALPHABET), width, 1), loss, part(topics(seed, 16), 640)
    if family == "gpt":
        length, heads = draw.choice([8, 16]), draw.choice([1, 2])
        model = partial(CharGpt, len(ALPHABET), length, heads * 8, heads, draw.choice([1, 2]), draw.random() < 0.3)
        return family, model, loss, part(topics(seed, length), 640)
    loss, inputs, outputs = draw.choice([loss, "mse"]), draw.choice([5, 32, 100]), draw.choice([2, 10, 33])
    hidden = [draw.choice([3, 16, 64, 200]) for _ in range(draw.randint(0, 3))]
    return family, partial(Mlp, inputs, hidden, outputs), loss, synthetic(seed, 2000, inputs, outputs, loss)


def recipe_case(seed: int, precision: str) -> Case:
    """Draws an optimizer, a schedule, a clip and an accumulation for any network. Convolutions and recurrent layers are
    in bf16: in fp16 a CPU computes them slowly or not at all."""
    draw = random.Random(seed)
    family, model, loss, dataset = random_network(draw, seed)
    task = Task(
        model,
        loss,
        random_optimizer(draw),
        draw.choice([16, 32, 64]),
        2000,
        schedule=random_schedule(draw),
        accumulate=draw.choice([1, 1, 2, 4]),
        clip_norm=draw.choice([None, 0.01, 0.3, 1.0, 100.0]),
        clip_norm_type=draw.choice([2.0, 2.0, float("inf")]),
    )
    precision = "bf16" if family in ("cnn", "lstm") else precision
    backends = {**BY_HAND, **TORCH_MODELS} if family == "mlp" else TORCH_MODELS
    return Case(task, dataset, precision, seed, draw.choice([12, 12, 30]), backends)


def peers_case(seed: int, precision: str) -> Case:
    """Draws a task of another family for the peers that are meant to be ``amp``. FSDP2 is none where it casts layer
    norms and embeddings, whose gradients torch's CPU then sums in bf16 (docs/upstream)."""
    families = ["mlp", "gpt", "recipe", "recipe"]
    if precision == "bf16":  # in fp16 a CPU has no LSTM, and its convolutions are slow
        families += ["mlp", "cnn", "cnn", "lstm"]
    case = CASES[random.Random(seed).choice(families)](seed, precision)
    if case.precision != precision:  # the recipe of a CNN or an LSTM
        case = gpt_case(seed, precision)
    backends = dict(PEERS[precision])
    if any(isinstance(module, (nn.LayerNorm, nn.Embedding)) for module in case.task.model().modules()):
        backends.pop("fsdp2", None)
    return replace(case, backends=backends)


def random_groups(draw: random.Random, model: nn.Module) -> list[dict[str, Any]]:
    """Returns parameter groups that all take a parameter of the network: by kind, by a layer, or by both."""
    layers = sorted({name.rpartition(".")[0] for name, p in model.named_parameters() if p.dim() > 1})
    weights = {"match": f"{draw.choice(layers)}.*weight*", "lr_factor": draw.choice([0.1, 0.3, 3.0])}
    kind = {"kind": draw.choice(["vectors", "biases"]), "weight_decay": 0, "lr_factor": draw.choice([1.0, 1.0, 2.0])}
    return draw.choice([[kind], [weights, kind], [kind, weights], [{**weights, "weight_decay": 0.2}, kind]])


def groups_case(seed: int, precision: str) -> Case:
    """Draws parameter groups in the place of :func:`recipe_case`'s optimizer without them."""
    case, draw = recipe_case(seed, precision), random.Random(seed)
    groups = random_groups(draw, case.task.model())
    decay = draw.choice([1e-4, 0.01, 0.1])
    optimizer = replace(case.task.optimizer, groups=groups, weight_decay=decay)  # type: ignore[type-var]
    backends = {name: backend for name, backend in case.backends.items() if name != "fused"}
    return replace(case, task=replace(case.task, optimizer=optimizer), backends=backends)


def branches_case(seed: int, precision: str) -> Case:
    """Draws a network with branches, and a recipe for it. Each batch, or micro-batch, uses one branch."""
    case, draw = recipe_case(seed, precision), random.Random(seed)
    inputs, outputs, heads = draw.choice([5, 32]), draw.choice([2, 10]), draw.choice([2, 3])
    task = replace(
        case.task, model=partial(Branches, inputs, draw.choice([16, 64]), outputs, heads), loss="cross_entropy"
    )
    order = draw.choice([list(range(heads)), [0, *range(heads)], [0, 0, 0, 0, *range(heads)]])
    rows = draw.choice([task.batch_size, task.micro_batch_size])
    return replace(
        case, task=task, dataset=branched(seed, 1920, inputs, outputs, rows, order), precision=precision,
        backends={name: backend for name, backend in TORCH_MODELS.items() if name != "reversed"},
    )  # fmt: skip


def masked_case(seed: int, precision: str) -> Case:
    """Draws a network on text with prompts of many lengths, whose labels are left out, and a recipe for it."""
    case, draw = recipe_case(seed, precision), random.Random(seed)
    length, heads = draw.choice([8, 16]), draw.choice([1, 2])
    model: Callable[[], nn.Module] = partial(CharGpt, len(ALPHABET), length, heads * 8, heads, draw.choice([1, 2]))
    if precision == "bf16" and draw.random() < 0.3:
        model = partial(CharLstm, len(ALPHABET), draw.choice([8, 24]), 1)
    data = part(topics(seed, length, masked=draw.choice([0.1, 0.3, 0.49])), 640)
    task = replace(case.task, model=model, loss="masked_cross_entropy", accumulate=draw.choice([1, 2, 4, 8]))
    return replace(case, task=task, dataset=data, precision=precision, backends=TORCH_MODELS)


CASES: dict[str, Callable[[int, str], Case]] = {
    "mlp": mlp_case, "unstable": unstable_case, "cnn": cnn_case, "lstm": lstm_case, "gpt": gpt_case,
    "recipe": recipe_case, "peers": peers_case, "dropout": dropout_case, "groups": groups_case,
    "branches": branches_case, "masked": masked_case,
}  # fmt: skip
