"""``check_backend``: all requirements, on each small task in each precision."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mpcompare import generators
from mpcompare.contract import BackendUnavailable
from mpcompare.errors import in_full
from mpcompare.instruments import fp32_products, machine
from mpcompare.precision import PRECISIONS, resolve_precision
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits, synthetic
from mpcompare.tasks.mlp import Mlp
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt
from mpcompare.testing import requirements
from mpcompare.testing.candidate import BrokenContract, Candidate, Checked
from mpcompare.testing.interface import of_the_class, of_the_interface

Tasks = Mapping[str, tuple[Task, Dataset]]


def check_backend(
    backend_class: Any, *, precision: str | None = None, device: str = "cpu", tasks: Tasks | None = None, **options: Any
) -> Checked:
    """Checks a backend's class against the contract.

    Args:
        backend_class: as ``mpcompare/contract.py`` describes it.
        precision: one of its ``PRECISIONS``, or ``auto``; None: all of them, without tf32 on a CPU.
        device: ``cpu``, ``cuda``, or ``auto``.
        tasks: by name, a task and its data of at least 10 batches; None: :func:`small_tasks`. Tasks that the backend
            says it cannot train (``BackendUnavailable``) are skipped.
        options: its own, for its constructor.

    Returns:
        The list of what was checked, and of what was skipped.

    Raises:
        BrokenContract: it breaks requirements (all are listed), or nothing could be checked.
        InputError: a precision that it does not have, or a device that is not there.
    """
    name = getattr(backend_class, "__name__", str(backend_class))
    if broken := list(of_the_class(backend_class, options)):
        raise BrokenContract(name, broken)
    where = machine.select_device(device)
    if precision is not None:
        precision = resolve_precision(precision, backend_class.PRECISIONS, where.type, name)
    checked = Checked()
    candidates_of: dict[str, list[str]] = {}
    for task_name, (task, dataset) in (small_tasks() if tasks is None else tasks).items():
        there = dataset.to(where)
        for each in backend_class.PRECISIONS if precision is None else (precision,):
            candidate = Candidate(backend_class, task, there, each, options, where, task_name)
            tf32 = PRECISIONS[each].uses_tf32
            if tf32 and where.type != "cuda":
                checked.skipped[candidate.name] = f"{each} needs a CUDA GPU"
                continue
            with fp32_products.tf32(tf32), generators.kept(where):
                for sentence in _check(candidate, checked):
                    candidates_of.setdefault(sentence, []).append(candidate.name)
    broken = [f"{sentence} ({', '.join(candidates)})" for sentence, candidates in candidates_of.items()]
    if not broken and not checked.candidates:
        reasons = "; ".join(dict.fromkeys(checked.skipped.values()))
        broken = [f"nothing could be checked: {reasons or 'there is no task'}"]
    if broken:
        raise BrokenContract(name, broken)
    return checked


def _check(candidate: Candidate, checked: Checked) -> Iterator[str]:
    try:
        candidate = replace(candidate, task=candidate.fitted()[1])
        backend = candidate.new()
    except BackendUnavailable as error:
        checked.skipped[candidate.name] = str(error)
        return
    except Exception as error:
        yield f"the constructor raises {in_full(error)}"
        return
    checked.candidates.append(candidate.name)
    if broken := list(of_the_interface(backend)):
        yield from broken
        return
    broken = [each for requirement in requirements.REQUIREMENTS for each in _all_of(requirement, candidate, checked)]
    yield from broken or _all_of(requirements.verdict, candidate, checked)


def _all_of(requirement: requirements.Requirement, candidate: Candidate, checked: Checked) -> Iterator[str]:
    """Yields a sentence for each breach of the requirement; a backend that raises breaks it."""
    try:
        yield from requirement(candidate, checked)
    except Exception as error:
        yield f"{(requirement.__doc__ or '').splitlines()[0].rstrip('.')}: raises {in_full(error)}"


def small_tasks() -> dict[str, tuple[Task, Dataset]]:
    """Returns the tasks on which a backend is checked, each with 12 batches: ``mlp``, ``recipe``, ``cnn`` and
    ``transformer``. They train with momentum, so that the optimizer has a state. ``recipe`` is the MLP with two
    micro-batches a step, and a norm of clipping that its gradients exceed."""
    optimizer = Sgd(0.1, 0.9)
    mlp = Task(partial(Mlp, 20, [24, 16], 5), "cross_entropy", optimizer, 32, 32 * 12)
    cnn = Task(_cnn, "cross_entropy", optimizer, 16, 16 * 12)
    gpt = Task(partial(CharGpt, vocabulary=16, length=8, width=32, heads=2, blocks=1), "cross_entropy", optimizer, 32)
    recipe = replace(mlp, accumulate=2, clip_norm=0.1)
    vectors = synthetic(0, 32 * 12, 20, 5, "cross_entropy")
    return {
        "mlp": (mlp, vectors),
        "recipe": (recipe, vectors),
        "cnn": (cnn, digits(0, 16 * 12)),
        "transformer": (gpt, _tokens(32 * 12)),
    }


def _cnn() -> nn.Module:
    """Makes a network from ``[N, 1, 28, 28]`` to ``[N, 10]``. A bias before a batch
    norm has no gradient, so the convolutions have none."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 7 * 7, 10),
    )  # fmt: skip


def _tokens(samples: int) -> Dataset:
    """Makes ids ``[samples, 8]`` below 16. Mostly an id is three times the id before it plus 1."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(16, (samples, 9), generator=generator)
    noise *= torch.rand(samples, 9, generator=generator) < 0.2
    ids = [torch.randint(16, (samples,), generator=generator)]
    for extra in noise.T[1:]:
        ids.append((3 * ids[-1] + 1 + extra) % 16)
    tokens = torch.stack(ids, dim=1)
    x, y = tokens[:, :-1], tokens[:, 1:]
    return Dataset("tokens", "asked for", x, y, x[:16], y[:16])
