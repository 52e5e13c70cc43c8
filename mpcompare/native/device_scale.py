"""The loss scale of a step that never asks the host: loss_scale.py with its numbers on the device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpcompare.loss_scale import OF_GRAD_SCALER, DynamicLossScale, LossScale, require_one_of, state_of


class DeviceLossScale:
    """A loss scale by the native operators, with the same policy and the same bits, in fp32 scalars."""

    def __init__(self, scaling: LossScale, device: torch.device) -> None:
        require_one_of(OF_GRAD_SCALER, scaling, "backend=fused")
        self.scaling = scaling
        self.scale = torch.tensor(scaling.scale, dtype=torch.float32, device=device)  # the scale of the next step
        self.used_scale = self.scale.clone()  # the scale of the last step: the gradients are divided by it
        self.found_inf = torch.zeros((), device=device)  # not 0 where the last step's gradients held inf or NaN
        self.growth_tracker, self.overflows_left = (
            torch.tensor(getattr(scaling, name, 0), dtype=torch.int32, device=device)
            for name in ("growth_tracker", "overflows_left")
        )

    def check(self, *scaled_grads: Tensor) -> None:
        """Sets ``found_inf`` and ``used_scale``. Without loss scaling no gradient is checked, as without a
        ``GradScaler``."""
        self.used_scale.copy_(self.scale)
        if not self.scaling.scales:
            return
        self.found_inf.zero_()
        for grad in scaled_grads:
            torch.ops.mpcompare.non_finite(grad, self.found_inf)

    def update(self) -> None:
        """Sets ``scale`` for the next step."""
        if isinstance(self.scaling, DynamicLossScale):
            scaling = self.scaling
            torch.ops.mpcompare.update_scale(
                self.scale, self.growth_tracker, self.overflows_left, self.found_inf, min_scale=scaling.min_scale,
                growth_factor=scaling.growth_factor, backoff_factor=scaling.backoff_factor,
                growth_interval=scaling.growth_interval, hysteresis=scaling.hysteresis,
            )  # fmt: skip

    def state(self) -> dict[str, float]:
        """Returns the values that the next step depends on, under the names of loss_scale.py; waits for the device."""
        known = state_of(self.scaling)
        return {name: getattr(self, name).item() for name in known}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Loads what :meth:`state` returns, as ``loss_scale.load_state`` does: a fixed scale keeps its own."""
        for name in state_of(self.scaling):
            if name in state and isinstance(self.scaling, DynamicLossScale):
                getattr(self, name).fill_(state[name])
