"""The policy of each library as a function of a state and an overflow, written after its source; and what follows one.

A policy here says what a library does with a loss scale when it is left alone: its defaults are those of the library.
The tests compare each with the library's own code, step by step and bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from mpcompare.loss_scale import DynamicLossScale, fp32, load_state, state_of
from mpcompare.precision import FP32


class ScalerStopped(Exception):  # noqa: N818 - a policy ends training so, and it is no fault of ours
    """A policy ends training with an error."""


@dataclass(frozen=True)
class ScalerState:
    """The values on which the next step depends, under the names of loss_scale.py."""

    scale: float
    growth_tracker: int
    overflows_left: int


@dataclass(frozen=True)
class ScalerPolicy:
    """A library's policy."""

    # returns the state after a step that overflowed (True) or was finite
    after: Callable[["ScalerPolicy", ScalerState, bool], ScalerState]
    # init_scale, growth_interval, hysteresis, min_scale: its defaults, whatever the library calls them
    init_scale: float = 2.0**16
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 0.0

    def start(self) -> ScalerState:
        return ScalerState(fp32(self.init_scale), 0, self.hysteresis)

    def next(self, state: ScalerState, overflow: bool) -> ScalerState:
        return self.after(self, state, overflow)


def as_in_loss_scale_py(policy: ScalerPolicy, state: ScalerState, overflow: bool) -> ScalerState:
    """Torch's policy and jmp's are those of ``mpcompare/loss_scale.py``, the latter with a min scale.

    torch: https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
    jmp: https://github.com/google-deepmind/jmp/blob/main/jmp/_src/loss_scale.py
    """
    scaling = DynamicLossScale(policy.init_scale, growth_interval=policy.growth_interval, min_scale=policy.min_scale)
    load_state(scaling, vars(state))
    scaling.update(overflow)
    return ScalerState(**state_of(scaling))  # type: ignore[arg-type]  # its values are those of vars(state)


def as_in_keras(policy: ScalerPolicy, state: ScalerState, overflow: bool) -> ScalerState:
    """Doubles without end, so that the scale becomes inf beyond fp32, and halves without end, down to 0.

    https://github.com/keras-team/keras/blob/master/keras/src/optimizers/loss_scale_optimizer.py
    """
    if overflow:
        return replace(state, scale=fp32(state.scale * 0.5), growth_tracker=0)
    if state.growth_tracker + 1 == policy.growth_interval:
        return replace(state, scale=fp32(state.scale * 2), growth_tracker=0)
    return replace(state, growth_tracker=state.growth_tracker + 1)


def as_in_flax(policy: ScalerPolicy, state: ScalerState, overflow: bool) -> ScalerState:
    """Doubles at the step that follows as many good ones as the growth interval: the tracker counts late, and starts
    anew at 0 after it. The largest scale is fp32's largest number, and the smallest its smallest normal one.

    https://github.com/google/flax/blob/main/flax/training/dynamic_scale.py
    """
    if overflow:
        return replace(state, scale=max(fp32(state.scale * 0.5), policy.min_scale), growth_tracker=0)
    if state.growth_tracker == policy.growth_interval:
        return replace(state, scale=min(fp32(state.scale * 2), FP32.maximum), growth_tracker=0)
    return replace(state, growth_tracker=state.growth_tracker + 1)


def as_in_deepspeed(policy: ScalerPolicy, state: ScalerState, overflow: bool) -> ScalerState:
    """Counts late as flax does, but never starts anew after growth: the second growth comes an interval after the
    first. An overflow backs off once there were ``hysteresis`` of them since the scale last grew; at the min scale it
    is an error instead. The scale is a number of Python's, which goes beyond fp32's.

    https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/fp16/loss_scaler.py
    """
    if overflow:
        if state.overflows_left > 1:
            return replace(state, growth_tracker=0, overflows_left=state.overflows_left - 1)
        if state.scale == policy.min_scale:
            raise ScalerStopped
        return replace(state, scale=max(state.scale / 2, policy.min_scale), growth_tracker=0)
    good = state.growth_tracker  # good steps before this one since the last overflow
    if good > 0 and good % policy.growth_interval == 0:
        return ScalerState(state.scale * 2, good + 1, policy.hysteresis)
    return replace(state, growth_tracker=good + 1)


def as_in_megatron(policy: ScalerPolicy, state: ScalerState, overflow: bool) -> ScalerState:
    """Backs off once there were ``hysteresis`` overflows since the scale last grew, down to the min scale, and doubles
    without end.

    https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/grad_scaler.py
    """
    if overflow:
        left = state.overflows_left - 1
        scale = max(fp32(state.scale * 0.5), policy.min_scale) if left <= 0 else state.scale
        return ScalerState(scale, 0, left)
    if state.growth_tracker + 1 == policy.growth_interval:
        return ScalerState(fp32(state.scale * 2), 0, policy.hysteresis)
    return replace(state, growth_tracker=state.growth_tracker + 1)


def good_steps_to_grow(policy: ScalerPolicy) -> int:
    """Returns how many good steps in a row it takes until the scale grows."""
    policy = replace(policy, init_scale=2.0**16)  # far from the ends of the range
    state, steps = policy.start(), 0
    while state.scale <= policy.init_scale:
        state, steps = policy.next(state, overflow=False), steps + 1
    return steps


class Scaler(Protocol):
    """Takes steps whose gradients are finite or not. Each library's own code is one, and so is each policy."""

    @property
    def scale(self) -> float:
        """The loss scale of the next step."""

    def step(self, overflow: bool) -> bool:
        """Takes a step whose gradients overflow, or not, and returns whether the step was skipped. Raises ScalerStopped
        where the library ends training here."""


class PolicyScaler:
    """Follows a policy, and skips the steps that overflow."""

    def __init__(self, policy: ScalerPolicy) -> None:
        self.policy, self.state = policy, policy.start()

    @property
    def scale(self) -> float:
        return self.state.scale

    def step(self, overflow: bool) -> bool:
        self.state = self.policy.next(self.state, overflow)
        return overflow
