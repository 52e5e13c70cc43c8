"""Verdicts on planted bugs, compared with a run of ``amp`` that is taken once for each task and precision."""

import copy
from typing import Any
from unittest import mock

from planted.registry import Bug, Family
from support.backends import BACKENDS
from support.judging import examined

from mpcompare.report.runs import Run
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.task import Task
from mpcompare.testing import examined as examined_module
from mpcompare.verdict.judge.verdict import Verdict

_references: dict[str, tuple[Dataset, Run]] = {}


def reference(family: Family, precision: str, **changes: Any) -> tuple[Task, Dataset, Run]:
    """Returns the family's task with these changes, its data, and the run of ``amp`` on them."""
    task, dataset = family.make(**changes)
    key = f"{family.name} {precision} {changes}"
    if key not in _references:
        amp = examined("amp", BACKENDS["amp"], task, dataset, precision, steps=family.steps, noise=2)
        _references[key] = dataset, amp
    return task, *_references[key]


def judged(bug: Bug, precision: str) -> Verdict:
    """Returns the verdict on a run with the bug."""
    task, dataset, amp = reference(bug.family, precision, **bug.task)
    with mock.patch.object(examined_module, "batches", bug.batches):
        # A copy, because some bugs write into it.
        run = examined(bug.name, bug.backend, task, copy.deepcopy(dataset), precision, steps=bug.family.steps)
    return judge_run(run, amp)
