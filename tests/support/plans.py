"""A plan of a small run, and others that differ from it in some knobs."""

from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

from support.tasks import make_task

from mpcompare.backends.fp32 import Fp32
from mpcompare.entrant.plan import Evaluation, Examination, Inference, Monitoring, Plan, Resumption, Training
from mpcompare.loss_scale import auto
from mpcompare.race.turns import Rules
from mpcompare.tasks.data.generated import digits

SMALL_PLAN = Plan(
    backend="fp32", make_backend=Fp32, options={}, is_baseline=False, task=make_task(in_features=784, out_features=10),
    task_config={}, load_data=partial(digits, samples=96), loss_scale=auto, precision="auto", device="cpu", seed=0,
    train=Training(steps=4, warmup_steps=1, deterministic=False, checkpoint_every=None),
    resume=Resumption(folder=None, older=False), eval=Evaluation(every=None), monitor=Monitoring(every=None),
    measure=Rules(rel_ci=0.02, budget_s=60.0, block_s=0.002),
    inference=Inference(enabled=False, budget_s=1.0, batch_size=None), verdict=Examination(enabled=False, noise=0),
)  # fmt: skip


def replan(plan: Plan, **changes: Any) -> Plan:
    """Returns the plan with other values; a dict changes the knobs of a section: ``train={"steps": 8}``."""
    for name, value in changes.items():
        before = getattr(plan, name)
        after = replace(before, **value) if is_dataclass(before) and isinstance(value, dict) else value
        plan = replace(plan, **{name: after})
    return plan
