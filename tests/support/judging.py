"""Runs that are trained and examined in this process, as their records would be read back, and verdicts on them."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from support.backends import BACKENDS
from support.cases import Case

from mpcompare.backends.torch_model import require_kernels
from mpcompare.errors import BackendUnavailable
from mpcompare.loss_scale import LossScale
from mpcompare.report.runs import Run
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits, synthetic
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.tasks.task import Task
from mpcompare.testing import Candidate, examined_run
from mpcompare.verdict.judge.verdict import Verdict


def examined(
    name: str,
    backend_class: Any,
    task: Task,
    dataset: Dataset,
    precision: str,
    seed: int = 0,
    policy: LossScale | None = None,
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
    **more: int,
) -> Run:
    """Trains a backend and examines it; ``more`` are the steps and the noise runs of ``examined_run``."""
    where = torch.device(device)
    candidate = Candidate(backend_class, task, dataset.to(where), precision, options or {}, where)
    return examined_run(name, candidate, seed=seed, scaling=policy, **more)


def compared_with_amp(backend: Any, task: Task, dataset: Dataset, precision: str, steps: int) -> Verdict:
    """Returns the verdict on a backend, compared with ``amp`` and two runs that find its noise."""
    amp = examined("amp", BACKENDS["amp"], task, dataset, precision, steps=steps, noise=2)
    return judge_run(examined("run", backend, task, dataset, precision, steps=steps), amp)


def dataset_of(task: Task, seed: int = 0) -> Dataset:
    """Returns data of the shape of the task's MLP."""
    mlp = plain_mlp(task.new_model(0, torch.device("cpu")), task)
    if mlp.in_features == 784 and task.loss == "cross_entropy" and mlp.out_features == 10:
        return digits(seed, task.samples)
    return synthetic(seed, task.samples, mlp.in_features, mlp.out_features, mlp.loss)


def judged_case(case: Case) -> Iterator[tuple[str, Verdict]]:
    """Yields the verdict on ``amp`` itself, and on each correct implementation compared with it."""

    def run(name: str, backend: type, noise: int = 0) -> Run:
        return examined(
            name, backend, case.task, case.dataset, case.precision, case.seed, steps=case.steps, noise=noise
        )

    amp = run("amp", BACKENDS["amp"], noise=2)
    yield "amp", judge_run(amp, amp)
    for name, backend in case.backends.items():
        yield name, judge_run(run(name, backend), amp)


def accused(case: Case) -> list[str]:
    """Returns a line for each correct run of the case that the verdict does not find to be the same.

    The test is skipped where this CPU has no kernel for a recurrent layer that was drawn.
    """
    try:
        require_kernels(case.task.model(), "cpu", case.precision, "amp")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    verdicts = judged_case(case)
    return [f"{name}: {v}: {v.because}" for name, v in verdicts if v.word not in ("same", "not seen", "reference")]
