"""``GradScaler``, looked at while a loop is watched: whoever calls ``step(optimizer)`` is the scaler of that loop.

A skipped step calls no hook of an optimizer that is not fused, so the scaler itself must be asked.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.amp import GradScaler

from mpcompare.errors import InputError
from mpcompare.loss_scale import DynamicLossScale, LossScale

LOOKED_AT = ("scale", "unscale_", "step", "update")


@dataclass(frozen=True)
class ScaleChange:
    """One call of ``update``."""

    # before, after: the loss scale
    before: float
    after: float
    found_inf: bool  # whether a gradient was inf or NaN
    given: bool  # whether the loop gave the new scale itself


# Is given a scaler, the name of a method, a call that it makes, and its first argument; returns what the call returns.
Looker = Callable[[Any, str, Callable[[], Any], Any], Any]
_lookers: list[Looker] = []
_replaced = ExitStack()  # holds the replaced methods; it puts back the class's own


@contextmanager
def told(looker: Looker) -> Iterator[None]:
    """Tells a looker of all scalers while it is entered. The last looker leaves the class as it was."""
    if not _lookers:
        for name in LOOKED_AT:
            _replaced.enter_context(mock.patch.object(GradScaler, name, _telling(name, getattr(GradScaler, name))))
    _lookers.append(looker)
    try:
        yield
    finally:
        _lookers.remove(looker)
        if not _lookers:
            _replaced.close()


def _telling(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        call: Callable[[], Any] = functools.partial(original, scaler, *args, **kwargs)
        by_name = (kwargs[key] for key in ("outputs", "optimizer", "new_scale") if key in kwargs)
        first = args[0] if args else next(by_name, None)
        for looker in _lookers if scaler.is_enabled() else ():
            call = functools.partial(looker, scaler, name, call, first)
        return call()

    return method


def found_inf(scaler: Any, optimizer: torch.optim.Optimizer | None = None) -> bool:
    """Returns whether a scaler has found inf or NaN in the gradients of an optimizer since its last ``update``. If
    ``optimizer`` is None, the gradients of any optimizer count."""
    every = scaler._per_optimizer_states
    states = every.values() if optimizer is None else [every[id(optimizer)]]
    return any(bool(value) for state in states for value in state.get("found_inf_per_device", {}).values())


def policy_of(scaler: Any) -> LossScale | None:
    """Returns the policy of a scaler from its present scale on; None where we have no such policy."""
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    try:
        policy = DynamicLossScale(float(scaler.get_scale()), *factors)
    except InputError:
        return None
    policy.growth_tracker = int(scaler._get_growth_tracker())
    return policy
