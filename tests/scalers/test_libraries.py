"""The policies here take every step as the libraries' own code does, bit for bit."""

import random
from dataclasses import replace

import pytest

from mpcompare.scalers.overflows import FINITE, OVERFLOW, OverflowStep
from mpcompare.scalers.policies import ScalerPolicy
from mpcompare.scalers.registry import INSTALL, LIBRARIES
from mpcompare.scalers.trace import TakenStep, take

INIT_SCALES = (1.0, 2.0, 1000.1, 1024.0, 2.0**16, 2.0**32, 2.0**126, 2.0**127, 3e38)


def case(policy: ScalerPolicy, number: int) -> tuple[ScalerPolicy, list[OverflowStep]]:
    """Returns a policy from another init scale with a short growth interval, and steps of a random pattern."""
    draw = random.Random(number)
    policy = replace(policy, init_scale=draw.choice(INIT_SCALES), growth_interval=draw.randint(1, 6))
    share = draw.choice((0.05, 0.2, 0.5, 0.9))
    return policy, [OVERFLOW if draw.random() < share else FINITE for _ in range(draw.randint(1, 60))]


def compare(name: str, count: int) -> list[TakenStep]:
    """Compares the two on ``count`` patterns, and returns all steps."""
    library, taken = LIBRARIES[name], []
    if library.installed is None:
        pytest.skip(f"needs {library.package}: {INSTALL}")
    for number in range(count):
        policy, steps = case(library.policy, number)
        own = take(library.own(policy), steps)
        assert own == take(policy, steps), (number, policy)
        taken += own
    return taken


@pytest.mark.parametrize("name", LIBRARIES)
def test_policy_equals_the_librarys_own_code(name):
    taken = compare(name, 200)
    assert any(step.after > step.before for step in taken)
    assert any(step.after < step.before for step in taken)
    assert any(step.stopped for step in taken) == (name == "deepspeed")


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_policy_equals_the_librarys_own_code_on_10000_patterns(name):
    compare(name, 10_000)
