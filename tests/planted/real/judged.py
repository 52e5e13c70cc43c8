"""Verdicts on real bugs, compared with a run of ``amp`` that is taken once for each setting and precision."""

from planted.real.registry import RealBug, Setting
from support.backends import BACKENDS
from support.judging import examined

from mpcompare.report.runs import Run
from mpcompare.report.verdicts import judge_run
from mpcompare.verdict.judge.verdict import Verdict

_references: dict[tuple[Setting, str], Run] = {}


def reference(setting: Setting, precision: str) -> Run:
    """Returns the run of ``amp``, with two runs that find its noise."""
    if (setting, precision) not in _references:
        task, dataset = setting.make()
        _references[setting, precision] = examined(
            "amp", BACKENDS["amp"], task, dataset, precision, policy=setting.scaling, steps=setting.steps, noise=2
        )
    return _references[setting, precision]


def judged(bug: RealBug) -> Verdict:
    """Returns the verdict on a run with the bug."""
    setting = bug.setting
    task, dataset = setting.make()
    run = examined(bug.id, bug.backend, task, dataset, bug.precision, policy=setting.scaling, steps=setting.steps)
    return judge_run(run, reference(setting, bug.precision))
