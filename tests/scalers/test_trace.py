"""The first step that a scaler takes unlike torch, and the reason."""

from dataclasses import replace

import pytest
from support.scalers import by_policy

from mpcompare.precision import FP32
from mpcompare.scalers.overflows import of_pattern, of_thresholds, power
from mpcompare.scalers.trace import parting


def parted(name, steps, **options):
    return parting(by_policy("torch", steps, **options), by_policy(name, steps, **options))


SHORT = {"init_scale": 1024.0, "growth_interval": 4}
UP = {"init_scale": 2.0**127, "growth_interval": 1}


@pytest.mark.parametrize(
    ("name", "pattern", "options", "step", "why"),
    [
        ("flax", "." * 5, SHORT, 4, "counts late: grows at good step 5, torch at 4 (growth interval 4)"),
        ("deepspeed", "." * 5, SHORT, 4, "counts late: grows at good step 5, torch at 4 (growth interval 4)"),
        ("deepspeed", ".x", SHORT, 2, "hysteresis 2: this overflow does not halve the scale yet"),
        ("megatron", "..x", SHORT, 3, "hysteresis 2: this overflow does not halve the scale yet"),
        ("megatron", "." * 1000, {}, 1000, "growth interval 1000, torch's is 2000"),
        ("jmp", "xx", {"init_scale": 2.0}, 2, "it stays at its min scale, 2^0"),
        ("jmp", "x", {"init_scale": 1.5}, 1, "it backs off to its min scale only, 2^0"),
        (
            "flax",
            "..",
            UP,
            2,
            f"torch stays at 2^127, because fp32 has no larger power, and it grows to {power(FP32.maximum)}",
        ),
        ("keras", ".", UP, 1, "torch stays at 2^127, because fp32 has no larger power, and it grows to inf"),
    ],
)
def test_the_step_and_the_reason(name, pattern, options, step, why):
    assert parted(name, of_pattern(pattern), **options) == (step, why)


def test_a_policy_that_stops_parts_there_and_not_before(tmp_path):
    file = tmp_path / "thresholds.txt"
    file.write_text("0\n" * 4)
    torch, deepspeed = (by_policy(name, of_thresholds(file), init_scale=2.0) for name in ("torch", "deepspeed"))
    assert [step.after for step in deepspeed.steps] == [2, 1, 1]
    assert deepspeed.stopped
    assert parting(torch, deepspeed)[0] == 1
    assert parting(torch, replace(torch, steps=[*torch.steps[:2], deepspeed.steps[2]]))[1].startswith("it stops")


@pytest.mark.parametrize("name", ["keras", "jmp"])
def test_an_init_scale_of_its_own_is_no_parting(name):
    assert parted(name, of_pattern("..x....xx..")) is None


def test_with_thresholds_another_scale_is_a_reason(tmp_path):
    file = tmp_path / "thresholds.txt"
    file.write_text("32768\n32768\n")
    step, why = parted("keras", of_thresholds(file))
    assert (step, why) == (1, "at its scale of 2^15 the step does not overflow, unlike at torch's, 2^16")
    step, why = parted("megatron", of_thresholds(file))
    assert (step, why) == (1, "hysteresis 2: this overflow does not halve the scale yet")
