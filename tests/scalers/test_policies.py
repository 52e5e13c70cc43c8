"""The policies where they differ from each other, on patterns that a reader can follow."""

from dataclasses import replace

import pytest

from mpcompare.precision import FP32
from mpcompare.scalers.overflows import of_pattern
from mpcompare.scalers.policies import good_steps_to_grow
from mpcompare.scalers.registry import LIBRARIES
from mpcompare.scalers.trace import take


def after(name, pattern, init_scale=1024.0, interval=4):
    """Returns the scales after each step, and whether the library stopped."""
    policy = replace(LIBRARIES[name].policy, init_scale=init_scale, growth_interval=interval)
    taken = take(policy, of_pattern(pattern))
    return [step.after for step in taken], taken[-1].stopped


@pytest.mark.parametrize(
    ("name", "growths"),
    [
        ("torch", [4, 8]),
        ("keras", [4, 8]),
        ("jmp", [4, 8]),
        ("flax", [5, 10]),
        ("deepspeed", [5, 9]),
        ("megatron", [4, 8]),
    ],
)
def test_good_steps_after_which_the_scale_grows(name, growths):
    scales, _ = after(name, "." * 11)
    assert [step for step, scale in enumerate(scales, start=1) if scale > ([1024.0, *scales])[step - 1]] == growths
    assert good_steps_to_grow(replace(LIBRARIES[name].policy, growth_interval=4)) == growths[0]


@pytest.mark.parametrize(
    ("name", "scales"),
    [("torch", [4, 2, 2, 1]), ("deepspeed", [8, 4, 4, 2]), ("megatron", [8, 4, 4, 2])],
)
def test_hysteresis_spares_the_first_overflow_and_is_not_restored_by_a_good_step(name, scales):
    assert after(name, "xx.x", init_scale=8.0)[0] == scales


@pytest.mark.parametrize("name", ["deepspeed", "megatron"])
def test_hysteresis_is_restored_by_growth(name):
    assert after(name, "xx...x", init_scale=8.0, interval=2)[0][-2:] == [8.0, 8.0]


@pytest.mark.parametrize(
    ("name", "lowest", "stops"),
    [
        ("torch", 0.0, False),
        ("keras", 0.0, False),
        ("jmp", 1.0, False),
        ("flax", 2.0**-126, False),
        ("deepspeed", 1.0, True),
        ("megatron", 1.0, False),
    ],
)
def test_the_end_of_a_scale_that_always_overflows(name, lowest, stops):
    scales, stopped = after(name, "x" * 200)
    assert (scales[-1], stopped) == (lowest, stops)


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("torch", 2.0**127),
        ("keras", float("inf")),
        ("jmp", 2.0**127),
        ("flax", FP32.maximum),
        ("deepspeed", 2.0**129),
        ("megatron", float("inf")),
    ],
)
def test_the_end_of_a_scale_that_never_overflows(name, largest):
    scales, _ = after(name, "....", init_scale=2.0**126, interval=1)
    assert scales[-1] == largest
