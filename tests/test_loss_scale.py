import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpcompare.backends.amp import grad_scaler
from mpcompare.errors import InputError
from mpcompare.loss_scale import (
    DynamicLossScale,
    NoLossScale,
    StaticLossScale,
    any_non_finite,
    auto,
    load_state,
    state_of,
)


def follow(policy: StaticLossScale, trace: list[bool], static: bool = False) -> None:
    """Takes the policy and GradScaler through ``trace``, a gradient is inf if True. Scales and skips must be equal."""
    scaler = grad_scaler(policy, "cpu")
    p = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0)
    for overflow in trace:
        assert scaler.get_scale() == policy.scale
        p.grad = torch.tensor([1.0, math.inf if overflow else policy.scale, 3.0])
        before = p.detach().clone()
        found_inf = policy.found_inf([p.grad])
        expected = p.grad * policy.inv_scale

        scaler.scale(torch.zeros(()))  # as a training step would: GradScaler starts here
        scaler.unscale_(optimizer)
        torch.testing.assert_close(p.grad, expected, rtol=0, atol=0, equal_nan=True)
        scaler.step(optimizer)
        scaler.update(policy.init_scale if static else None)
        assert torch.equal(p, before) == found_inf
        policy.update(found_inf)
    assert scaler.get_scale() == policy.scale


@pytest.mark.slow
@given(
    trace=st.lists(st.booleans(), min_size=1, max_size=60),
    init_scale=st.sampled_from([1.0, 3.0, 1000.0, 65536.0, 2.0**120]),
    growth_factor=st.sampled_from([1.1, 1.5, 2.0, 4.0, 2.0**64]),
    backoff_factor=st.sampled_from([0.1, 0.5, 0.7]),
    growth_interval=st.integers(1, 5),
)
def test_dynamic_scale_is_grad_scalers_bit_for_bit(trace, init_scale, growth_factor, backoff_factor, growth_interval):
    follow(DynamicLossScale(init_scale, growth_factor, backoff_factor, growth_interval), trace)


@pytest.mark.slow
def test_dynamic_scale_follows_grad_scaler_over_a_long_trace_with_the_defaults():
    random = torch.Generator().manual_seed(0)
    trace = (torch.rand(5000, generator=random) < 0.0005).tolist()
    policy = DynamicLossScale()
    follow(policy, trace)
    assert sum(trace) > 0
    assert policy.growth_tracker > 0


@given(trace=st.lists(st.booleans(), min_size=1, max_size=20))
def test_static_scale_skips_like_grad_scaler_and_never_moves(trace):
    policy = StaticLossScale(512.0)
    follow(policy, trace, static=True)
    assert policy.scale == 512.0


def test_a_scale_that_always_overflows_decays_to_zero_without_a_floor_and_stops_at_the_floor_with_one():
    policy, floored = DynamicLossScale(), DynamicLossScale(min_scale=1.0)
    for _ in range(200):
        policy.update(True)
        floored.update(True)
    assert policy.scale == 0.0
    assert policy.inv_scale == math.inf
    assert floored.scale == 1.0


def test_growth_stops_before_fp32_overflows():
    policy = DynamicLossScale(init_scale=2.0**127, growth_interval=1)
    policy.update(False)
    assert policy.scale == 2.0**127


def test_hysteresis_2_backs_off_at_the_second_overflow_and_is_restored_by_growth():
    policy = DynamicLossScale(init_scale=8.0, growth_interval=2, hysteresis=2)
    scales = []
    for found_inf in (True, True, True, False, False, True, True):
        policy.update(found_inf)
        scales.append(policy.scale)
    #          1st  2nd  3rd  good grow 1st  2nd
    assert scales == [8.0, 4.0, 2.0, 2.0, 4.0, 4.0, 2.0]


def test_the_state_of_a_policy_is_all_that_it_remembers_of_its_steps():
    @dataclass
    class Remembers(DynamicLossScale):
        overflowed_at: float = field(default=math.inf, init=False)

    state = {"scale": 8.0, "growth_tracker": 3, "overflows_left": 1, "overflowed_at": 16.0}
    load_state(policy := Remembers(), state)
    assert state_of(policy) == state
    load_state(fixed := StaticLossScale(4.0), state)
    assert state_of(fixed) == {"scale": 4.0}
    assert state_of(NoLossScale()) == {}


def test_a_step_without_gradients_has_no_inf():
    assert StaticLossScale().found_inf([]) is False


def test_no_loss_scale_checks_nothing():
    policy = NoLossScale()
    assert not policy.found_inf([torch.tensor([math.nan])])
    policy.update(True)
    assert (policy.scale, policy.inv_scale) == (1.0, 1.0)


def test_auto_scales_fp16_only():
    assert {p: type(auto(p)) for p in ("fp16", "bf16", "tf32", "fp32")} == {
        "fp16": DynamicLossScale, "bf16": NoLossScale, "tf32": NoLossScale, "fp32": NoLossScale,
    }  # fmt: skip


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_non_finite_value_among_many_is_found(value, dtype, device):
    grads = [torch.ones(1000, device=device, dtype=dtype), torch.full((3, 5), 65504.0, device=device).to(dtype)]
    if dtype is torch.bfloat16:
        grads[1].fill_(3e38)
    assert not any_non_finite(grads)
    grads[0][617] = value
    assert any_non_finite(grads)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"init_scale": 0}, "init_scale"),
        ({"init_scale": math.nan}, "init_scale"),
        ({"init_scale": 1e39}, "init_scale"),
        ({"init_scale": 1e-50}, "init_scale"),
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"min_scale": -1.0}, "min_scale"),
        ({"min_scale": 131072.0}, "min_scale"),
    ],
)
def test_bad_options_are_named(options, field):
    with pytest.raises(InputError, match=f"loss_scale.{field}="):
        DynamicLossScale(**options)
