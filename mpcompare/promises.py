"""Promises: the differences from ``amp`` that a backend declares, so that the verdict can tell them from mistakes.

A promise excuses nothing by itself. The examination compares a backend with what it promises, the judge asks whether
the promise is seen to be kept, and every other difference is still one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpcompare.errors import check_choice, check_number
from mpcompare.precision import FP32, PRECISIONS

FORMATS = ("fp32", "bf16")  # with fp32's range, so that a bound by roundings holds
ROUNDINGS = {"nearest": 1, "stochastic": 2, "compensated": 2}  # in units of the format's unit roundoff, at most


@dataclass(frozen=True)
class Promises:
    """The differences from ``amp`` that a backend declares; by default none. Raises InputError where an attribute has
    another value."""

    # the format in which the optimizer keeps and updates the weights, and the network its buffers
    weights: str = "fp32"
    # the way in which updated weights are rounded to that format: ``nearest``; ``stochastic``, up or down at random;
    # ``compensated``, where a second tensor keeps what was rounded away (Kahan)
    rounding: str = "nearest"
    moments: str = "fp32"  # the format of the tensors that the optimizer keeps for each parameter
    # the norm to which gradients are clipped although the task clips nothing; None: they are not
    clip_norm: float | None = None
    # the settings of a dynamic loss scale that the backend always takes, whatever was asked for, under the names in
    # ``mpcompare.loss_scale.DynamicLossScale``
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    # whether a step whose gradients hold inf or NaN is skipped although the loss is not scaled
    skips_without_scale: bool = False
    restores_buffers: bool = False  # whether a step that is skipped leaves the network's buffers as they were before it
    repeats: bool = True  # whether a step gives the same bits each time that it is taken from one state

    def __post_init__(self) -> None:
        check_choice("promises.weights", self.weights, FORMATS)
        check_choice("promises.rounding", self.rounding, ROUNDINGS)
        check_choice("promises.moments", self.moments, FORMATS)
        if self.clip_norm is not None:
            check_number("promises.clip_norm", self.clip_norm, above=0)

    @property
    def coarse_weights(self) -> float:
        """The most by which a weight is rounded, in units of the rounding in fp32."""
        return ROUNDINGS[self.rounding] * _over_fp32(self.weights)

    @property
    def coarse_moments(self) -> float:
        """The most by which a moment is rounded when it is stored, in units of the rounding in fp32."""
        return _over_fp32(self.moments)

    @property
    def coarse(self) -> bool:
        """Whether weights or moments have fewer digits than fp32."""
        return self.weights != FP32.name or self.moments != FP32.name


NOTHING = Promises()


def _over_fp32(name: str) -> float:
    return PRECISIONS[name].storage.unit_roundoff / FP32.unit_roundoff
