"""The policy of each library as a loss scale of ours, written after its source; and the scalers that follow a policy.

A policy here says what a library does with a loss scale when nothing is set: it has the defaults of the library.
The tests compare each with the library's own code, step by step and bit for bit.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from mpcompare.loss_scale import DynamicLossScale, fp32
from mpcompare.precision import FP32


class ScalerStopped(Exception):  # noqa: N818 - a policy ends training so, and it is no fault of ours
    """A policy ends training with an error."""


@dataclass
class ScalerPolicy(DynamicLossScale):
    """A library's policy, which skips the steps that overflow. Torch and jmp have the policies of
    ``mpcompare/loss_scale.py``, jmp with a min scale.

    torch: https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
    jmp: https://github.com/google-deepmind/jmp/blob/main/jmp/_src/loss_scale.py
    """

    def step(self, overflow: bool) -> bool:
        """Takes a step, as a :class:`Scaler` does."""
        self.update(overflow)
        return overflow


class AsInKeras(ScalerPolicy):
    """Doubles without end, so that the scale becomes inf beyond fp32, and halves without end, down to 0.

    https://github.com/keras-team/keras/blob/master/keras/src/optimizers/loss_scale_optimizer.py
    """

    def update(self, found_inf: bool) -> None:
        self.growth_tracker += 1
        if found_inf or self.growth_tracker == self.growth_interval:
            self.scale = fp32(self.scale * (0.5 if found_inf else 2))
            self.growth_tracker = 0


class AsInFlax(ScalerPolicy):
    """Doubles at the step after so many good steps as the growth interval: the tracker counts late, and starts anew at
    0 after doubling. The largest scale is fp32's largest number, and the smallest its smallest normal number.

    https://github.com/google/flax/blob/main/flax/training/dynamic_scale.py
    """

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale, self.growth_tracker = max(fp32(self.scale * 0.5), self.min_scale), 0
        elif self.growth_tracker == self.growth_interval:
            self.scale, self.growth_tracker = min(fp32(self.scale * 2), FP32.maximum), 0
        else:
            self.growth_tracker += 1


class AsInDeepSpeed(ScalerPolicy):
    """Counts late as flax does, but never starts anew after growth: the second growth comes an interval after the
    first. An overflow backs off once there were ``hysteresis`` overflows since the scale last grew; at the min scale
    an overflow is an error instead. The scale is a Python number, which goes beyond fp32's range.

    https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/fp16/loss_scaler.py
    """

    def update(self, found_inf: bool) -> None:
        good = self.growth_tracker  # good steps before this one since the last overflow
        self.growth_tracker = 0 if found_inf else good + 1
        if found_inf and self.overflows_left > 1:
            self.overflows_left -= 1
        elif found_inf:
            if self.scale == self.min_scale:
                raise ScalerStopped
            self.scale = max(self.scale / 2, self.min_scale)
        elif good > 0 and good % self.growth_interval == 0:
            self.scale, self.overflows_left = self.scale * 2, self.hysteresis


class AsInMegatron(ScalerPolicy):
    """Backs off once there were ``hysteresis`` overflows since the scale last grew, down to the min scale, and doubles
    without end.

    https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/grad_scaler.py
    """

    def update(self, found_inf: bool) -> None:
        self.growth_tracker = 0 if found_inf else self.growth_tracker + 1
        if found_inf:
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.scale = max(fp32(self.scale * 0.5), self.min_scale)
        elif self.growth_tracker == self.growth_interval:
            self.scale, self.growth_tracker, self.overflows_left = fp32(self.scale * 2), 0, self.hysteresis


def good_steps_to_grow(policy: ScalerPolicy) -> int:
    """Returns how many good steps in a row it takes until the scale grows."""
    policy = replace(policy, init_scale=2.0**16)  # far from the ends of the range
    steps = 0
    while policy.scale <= policy.init_scale:
        policy.update(False)
        steps += 1
    return steps


class Scaler(Protocol):
    """Takes steps whose gradients are finite or not. Each library's own code is one, and so is each policy."""

    @property
    def scale(self) -> float:
        """The loss scale of the next step."""

    def step(self, overflow: bool) -> bool:
        """Takes a step whose gradients overflow, or not, and returns whether the step was skipped. Raises ScalerStopped
        where the library ends training here."""
