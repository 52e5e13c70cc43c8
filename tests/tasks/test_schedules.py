"""The schedules have the curves of torch.optim.lr_scheduler, as far as it has them."""

import math
from itertools import pairwise

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from mpcompare.errors import InputError
from mpcompare.tasks.schedules import Constant, Cosine, Warmup

LR = 0.3


def curve(scheduler_of, steps=60):
    """Returns the learning rates that one of torch's schedulers gives to each step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    scheduler, rates = scheduler_of(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def warmup(steps):
    """Returns torch's scheduler with the factors 1 / steps, 2 / steps, ..., 1."""
    return lambda optimizer: LinearLR(optimizer, start_factor=1 / steps, total_iters=steps - 1)


def cosine(steps, warmup_steps=0, min_factor=0.0):
    """Returns torch's scheduler, followed by a constant, because torch's cosine rises again after its end."""

    def scheduler(optimizer):
        half = CosineAnnealingLR(optimizer, steps - warmup_steps, eta_min=min_factor * LR)
        rest = ConstantLR(optimizer, factor=min_factor, total_iters=1000)
        if not warmup_steps:
            return SequentialLR(optimizer, [half, rest], [steps])
        return SequentialLR(optimizer, [warmup(warmup_steps)(optimizer), half, rest], [warmup_steps, steps])

    return scheduler


CURVES = [
    (Constant(), lambda optimizer: LambdaLR(optimizer, lambda _: 1.0)),
    (Warmup(1), lambda optimizer: LambdaLR(optimizer, lambda _: 1.0)),
    (Warmup(10), warmup(10)),
    (Warmup(1000), warmup(1000)),
    (Cosine(50), cosine(50)),
    (Cosine(50, min_factor=0.1), cosine(50, 0, 0.1)),
    (Cosine(50, 10), cosine(50, 10)),
    (Cosine(50, 1, 0.25), cosine(50, 1, 0.25)),
    (Cosine(11, 10, 0.25), cosine(11, 10, 0.25)),
    (Cosine(1), cosine(1)),
]


@pytest.mark.parametrize(("schedule", "theirs"), CURVES, ids=[repr(schedule) for schedule, _ in CURVES])
def test_the_whole_curve_is_torchs(schedule, theirs):
    rates = [LR * schedule.factor(updates) for updates in range(60)]
    assert rates == pytest.approx(curve(theirs), rel=1e-9, abs=1e-12)
    assert rates == pytest.approx(curve(lambda optimizer: LambdaLR(optimizer, schedule.factor)), rel=1e-15)


def test_a_cosine_falls_from_one_to_its_minimum_and_stays():
    schedule = Cosine(100, 20, 0.1)
    factors = [schedule.factor(updates) for updates in range(200)]
    assert factors[:20] == [(updates + 1) / 20 for updates in range(20)]
    assert factors[20] == 1.0
    assert factors[60] == pytest.approx(0.55)  # half way
    assert all(a > b for a, b in pairwise(factors[20:101]))
    assert factors[100:] == [pytest.approx(0.1)] * 100


def test_a_cosine_without_steps_takes_the_whole_run():
    assert Cosine(None, 3, 0.1).over(40) == Cosine(40, 3, 0.1)
    assert Cosine(7).over(40) == Cosine(7)
    assert (Constant().over(40), Warmup(3).over(40)) == (Constant(), Warmup(3))
    with pytest.raises(ValueError, match="over"):
        Cosine().factor(0)
    with pytest.raises(InputError, match="task.schedule.warmup_steps=40: expected fewer than the 40 steps"):
        Cosine(warmup_steps=40).over(40)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Warmup(0), "task.schedule.steps=0: expected a whole number of at least 1"),
        (lambda: Warmup(2.5), "task.schedule.steps=2.5"),
        (lambda: Cosine(0), "task.schedule.steps=0"),
        (lambda: Cosine(True), "task.schedule.steps=True"),
        (lambda: Cosine(5, 5), "task.schedule.warmup_steps=5: expected fewer than the 5 steps of the whole schedule"),
        (lambda: Cosine(5, -1), "task.schedule.warmup_steps=-1: expected a whole number of at least 0"),
        (lambda: Cosine(5, min_factor=1), "task.schedule.min_factor=1: expected a finite number of at least 0 and"),
        (lambda: Cosine(5, min_factor=-0.1), "task.schedule.min_factor=-0.1"),
        (lambda: Cosine(5, min_factor=math.nan), "task.schedule.min_factor=nan"),
    ],
)
def test_bad_values_name_the_field(make, message):
    with pytest.raises(InputError, match=message):
        make()
