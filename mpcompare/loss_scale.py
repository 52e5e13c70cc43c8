"""Loss scaling, the second technique of mixed precision training (Micikevicius et al., arXiv 1710.03740, section 3.2).

The smallest fp16 number is 2^-24: gradients below half of it become zero, and those near it lose their digits. So the
loss, and with it every gradient, is multiplied by a scale before backward and divided by it before the update; powers
of two cost no precision. A scale that is too large overflows: a gradient becomes inf or NaN, the step is skipped, and a
dynamic scale backs off.

    scale  -> multiplied into the gradient of the loss        inv_scale      -> multiplied into the fp32 gradients
    found_inf(grads) -> must this step be skipped?            update(found_inf) -> the scale of the next step

The three policies follow ``torch.amp.GradScaler`` bit for bit, its keys and its defaults included. CONTRIBUTING.md
says how to add one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mpcompare.errors import InputError, check_number, check_whole
from mpcompare.precision import FP32, PRECISIONS


def fp32(number: float) -> float:
    """Returns a number as fp32 holds it; inf beyond its largest number."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(number))


def any_non_finite(grads: Iterable[Tensor]) -> bool:
    """True if any gradient holds inf or NaN. Reading the answer is the step's one wait for the device."""
    extremes = [value for g in grads for value in torch.aminmax(g)]  # NaN is both; no temporary the size of g
    return bool(extremes) and not torch.stack(extremes).isfinite().all().item()


@dataclass
class NoLossScale:
    """Scale 1, and no overflow check: the update happens whatever the gradients hold, as without a ``GradScaler``."""

    name: ClassVar[str] = "none"
    scales: ClassVar[bool] = False
    scale: float = field(default=1.0, init=False)
    inv_scale: float = field(default=1.0, init=False)

    def starting_at(self, scale: float) -> "LossScale":
        return self

    def found_inf(self, grads: Iterable[Tensor]) -> bool:
        return False

    def update(self, found_inf: bool) -> None:
        pass


@dataclass
class StaticLossScale:
    """A fixed scale; steps that overflow are skipped."""

    name: ClassVar[str] = "static"
    scales: ClassVar[bool] = True
    init_scale: float = 65536.0
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        check_number("loss_scale.init_scale", self.init_scale, above=0)
        self.init_scale = float(self.init_scale)  # GradScaler.update takes a float or a tensor, and no int
        self.scale = fp32(self.init_scale)
        if self.scale in (0.0, math.inf):
            raise InputError("loss_scale.init_scale", self.init_scale, "expected a number within the range of fp32")

    @property
    def inv_scale(self) -> float:
        """1 / scale, rounded to fp32; inf where the scale has decayed to 0."""
        return fp32(1 / self.scale) if self.scale else math.inf

    def starting_at(self, scale: float) -> "LossScale":
        """Returns the same policy from another scale on, as far as it allows that."""
        return replace(self, init_scale=max(scale, getattr(self, "min_scale", 0.0), FP32.smallest_normal))

    def found_inf(self, grads: Iterable[Tensor]) -> bool:
        return any_non_finite(grads)

    def update(self, found_inf: bool) -> None:
        pass


@dataclass
class DynamicLossScale(StaticLossScale):
    """Grows after ``growth_interval`` good steps in a row, backs off on overflow.

    Two options go beyond ``GradScaler``: ``min_scale``, a floor (without one a scale that keeps overflowing decays to
    0; then the scaled gradients are finite zeros, the step is taken, and 0 * inf makes every weight NaN), and
    ``hysteresis``, how many overflows back the scale off (DeepSpeed: 2; it is restored when the scale grows).
    """

    name: ClassVar[str] = "dynamic"
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 0.0
    hysteresis: int = 1
    growth_tracker: int = field(default=0, init=False)
    overflows_left: int = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("loss_scale.growth_factor", self.growth_factor, above=1)
        check_number("loss_scale.backoff_factor", self.backoff_factor, above=0, below=1)
        check_whole("loss_scale.growth_interval", self.growth_interval, at_least=1)
        check_whole("loss_scale.hysteresis", self.hysteresis, at_least=1)
        check_number("loss_scale.min_scale", self.min_scale, at_least=0)
        if self.min_scale > self.init_scale:
            raise InputError("loss_scale.min_scale", self.min_scale, f"expected at most init_scale={self.init_scale}")
        self.overflows_left = self.hysteresis

    @property
    def of_grad_scaler(self) -> dict[str, Any]:
        """The settings that ``GradScaler`` has too, under its names."""
        return {
            name: getattr(self, name) for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
        }

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth_tracker = 0
            self.overflows_left = max(self.overflows_left - 1, 0)
            if self.overflows_left == 0:
                self.scale = max(fp32(self.scale * self.backoff_factor), fp32(self.min_scale))
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            self.overflows_left = self.hysteresis
            grown = fp32(self.scale * self.growth_factor)
            if math.isfinite(grown):  # fp32 has no larger scale: stay
                self.scale = grown


LossScale = NoLossScale | StaticLossScale | DynamicLossScale
OF_GRAD_SCALER: tuple[type[LossScale], ...] = (NoLossScale, StaticLossScale, DynamicLossScale)


def state_of(scaling: LossScale) -> dict[str, float]:
    """Returns the values that the next step depends on; none where there is no loss scaling."""
    return {each.name: getattr(scaling, each.name) for each in fields(scaling) if scaling.scales and not each.init}


def load_state(scaling: LossScale, state: Mapping[str, float]) -> None:
    """Loads what :func:`state_of` returns. A value that is not in ``state`` stays as it is: another implementation's
    state may have no hysteresis, or no loss scaling at all. A fixed scale keeps its own."""
    if scaling.scales and type(scaling) is not StaticLossScale:
        vars(scaling).update({name: value for name, value in state.items() if hasattr(scaling, name)})


def auto(precision: str) -> LossScale:
    """Returns the precision's own policy with its defaults: dynamic for fp16, whose range is narrow; none where the
    range is fp32's."""
    return next(each() for each in OF_GRAD_SCALER if each.name == PRECISIONS[precision].loss_scale)


def require_one_of(known: Sequence[type[LossScale]], scaling: LossScale, who: str) -> None:
    """Raises InputError where ``who`` does not know a policy. A class derived from a known class is not known."""
    if type(scaling) not in known:
        names = ", ".join(each.name for each in known)
        raise InputError("loss_scale", scaling.name, f"{who} has none: expected one of auto, {names}")
