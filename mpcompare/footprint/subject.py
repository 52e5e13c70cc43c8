"""The network whose footprint is asked for, by its name: a size of GPT-2, a task of conf/task, or a module's path."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mpcompare.command.nodes import composed, options, task_of
from mpcompare.errors import InputError, check_choice, did_you_mean
from mpcompare.footprint.count import Batch, FootprintSubject
from mpcompare.footprint.fake import make_module
from mpcompare.tasks.complex_weights import as_real
from mpcompare.tasks.optimizers import AdamW
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt

# GPT-2: width of the residual stream, attention heads of a block, blocks. Radford et al., "Language Models are
# Unsupervised Multitask Learners" (2019), table 2.
SIZES = {"gpt2": (768, 12, 12), "gpt2-medium": (1024, 16, 24), "gpt2-large": (1280, 20, 36), "gpt2-xl": (1600, 25, 48)}
VOCABULARY, CONTEXT = 50257, 1024
IMAGES = {"mnist": (1, 28, 28), "digits": (1, 28, 28), "auto": (1, 28, 28), "cifar10": (3, 32, 32)}


class Gpt2(CharGpt):
    """Ids ``[N, T]``, T at most 1024, to the logits of each next id ``[N, T, 50257]``.

    The last layer has the weights of the embedding, and no bias. There is no dropout.
    """

    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__(VOCABULARY, CONTEXT, width, heads, blocks)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight


@dataclass(frozen=True)
class Wish:
    """The subject as it was asked for; None: by default."""

    name: str  # ``gpt2`` and its larger sizes, a task, or the path of a module's class or function
    arguments: Sequence[str] = ()  # ``KEY=VALUE`` of that module, or of the task's model
    batch: int | None = None  # samples of a batch
    length: int | None = None  # ids of a sample
    shape: tuple[int, ...] | None = None  # the shape of a sample of real numbers
    optimizer: str | None = None  # a name in conf/optimizer that needs no other setting


def subject_of(wish: Wish) -> FootprintSubject:
    """Returns the network that was asked for. Raises InputError where there is none of this name, or it cannot be made
    or called as asked."""
    task, batch = _gpt2(wish) if wish.name in SIZES else _configured(wish)
    if wish.batch is not None:
        task = replace(task, batch_size=wish.batch)
    if wish.optimizer is not None:
        words = [word for word in options("optimizer") if word not in ("task", "torch")]
        check_choice("--optimizer", wish.optimizer, words)
        task = replace(task, optimizer=task_of(composed([f"optimizer={wish.optimizer}"]).task).optimizer)
    model = make_module(task.model)
    if not isinstance(model, nn.Module):
        raise InputError("NAME", wish.name, f"makes a {type(model).__name__}: expected a torch.nn.Module")
    as_real(model)
    params = sum(p.numel() for p in model.parameters())
    kind = "momentum" if getattr(task.optimizer, "momentum", 0) else type(task.optimizer).__name__.lower()
    sample = "x".join(map(str, (task.batch_size, *batch.shape)))
    title = f"{wish.name}: {params:,} parameters, batch {sample}, {wish.optimizer or kind}"
    return FootprintSubject(title, task, model.train(), batch, is_task=wish.name not in SIZES and "." not in wish.name)


def _gpt2(wish: Wish) -> tuple[Task, Batch]:
    if wish.arguments or wish.shape:
        given = " ".join(wish.arguments) or f"--shape {','.join(map(str, wish.shape or ()))}"
        raise InputError("NAME", wish.name, f"takes --batch, --length and --optimizer, and no {given}")
    length = wish.length or CONTEXT
    if length > CONTEXT:
        raise InputError("--length", length, f"{wish.name} has {CONTEXT} positions")
    task = Task(partial(Gpt2, *SIZES[wish.name]), "cross_entropy", AdamW(), batch_size=8)
    return task, Batch((length,), torch.int64)


def _configured(wish: Wish) -> tuple[Task, Batch]:
    """Returns a task of conf/task, or one of the module whose path was given."""
    names = [name for name in options("task") if name != "module"]
    if wish.name in names:
        overrides = [f"task={wish.name}", *(f"task.model.{argument}" for argument in wish.arguments)]
        if wish.length is not None:
            if "length" not in composed(overrides).data:
                raise InputError("--length", wish.length, f"{wish.name} has no ids")
            overrides.append(f"data.length={wish.length}")
    elif "." in wish.name:
        overrides = ["task=module", f"task.model._target_={wish.name}", *(f"+task.model.{a}" for a in wish.arguments)]
    else:
        near = did_you_mean(wish.name, known := (*SIZES, *names))
        expected = f"expected one of {', '.join(known)}, or the path of a module, as my_package.Net{near}"
        raise InputError("NAME", wish.name, expected)
    cfg = composed(overrides)
    return task_of(cfg.task), Batch(*_sample(wish, cfg.data, cfg.task.model))


def _sample(wish: Wish, data: Any, model: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns the shape and dtype of a sample, as it was given or as the task's data has it."""
    if wish.shape is not None:
        if wish.length is not None:
            raise InputError("--length", wish.length, "expected either --length, for ids, or --shape, for real numbers")
        return wish.shape, torch.float32
    source = str(data._target_).rpartition(".")[2]
    if "." in wish.name:
        if wish.length is None:
            raise InputError("NAME", wish.name, "needs --shape of a sample (3,224,224), or --length for ids of tokens")
        return (wish.length,), torch.int64
    if source in IMAGES:
        return IMAGES[source], torch.float32
    return ((data.length,), torch.int64) if "length" in data else ((model.in_features,), torch.float32)
