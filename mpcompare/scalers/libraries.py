"""The libraries' own scalers, driven without training: the gradient of one parameter is inf where a step overflows.

Each is made with the init scale, growth interval, hysteresis and min scale of a policy. A library is imported when its
scaler is made. The scalers of DeepSpeed, Megatron and jmp are told of an overflow and leave the skipping to others; the
scalers of torch, Keras and flax look for overflows themselves.
"""

import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from mpcompare.backends.torch_model import skipped_by
from mpcompare.scalers.policies import ScalerPolicy, ScalerStopped


class Torch:
    """``torch.amp.GradScaler`` with an SGD optimizer; a step is skipped where the optimizer is not called."""

    def __init__(self, policy: ScalerPolicy) -> None:
        self.parameter = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)
        init_scale, interval = policy.scale, policy.growth_interval
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=interval)

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def step(self, overflow: bool) -> bool:
        self.scaler.scale(torch.zeros(()))  # the scaler starts here
        self.parameter.grad = torch.tensor([math.inf if overflow else 1.0])
        skipped = skipped_by(lambda: self.scaler.step(self.optimizer), self.optimizer)
        self.scaler.update()
        return bool(skipped)


class Keras:
    """``keras.optimizers.LossScaleOptimizer`` around SGD; a step is skipped where SGD counts no iteration."""

    def __init__(self, policy: ScalerPolicy) -> None:
        os.environ.setdefault("KERAS_BACKEND", "torch")
        import keras

        self.tensor = keras.ops.convert_to_tensor
        self.variable = keras.Variable([1.0])
        self.optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.0), initial_scale=policy.scale, dynamic_growth_steps=policy.growth_interval
        )
        self.optimizer.build([self.variable])

    @property
    def scale(self) -> float:
        return float(self.optimizer.dynamic_scale.value)

    def step(self, overflow: bool) -> bool:
        before = int(self.optimizer.iterations.value)
        self.optimizer.apply([self.tensor([math.inf if overflow else 1.0])], [self.variable])
        return int(self.optimizer.iterations.value) == before


class Flax:
    """``flax.training.dynamic_scale.DynamicScale``: its ``value_and_grad`` of a function whose gradient is inf or 1."""

    def __init__(self, policy: ScalerPolicy) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax.numpy
        from flax.training.dynamic_scale import DynamicScale

        start = jax.numpy.float32(policy.scale)
        self.scaler = DynamicScale(growth_interval=policy.growth_interval, scale=start)
        self.take = jax.jit(_flax_step)

    @property
    def scale(self) -> float:
        return float(self.scaler.scale)

    def step(self, overflow: bool) -> bool:
        self.scaler, finite = self.take(self.scaler, math.inf if overflow else 1.0)
        return not bool(finite)


def _flax_step(scaler: Any, gradient: Any) -> tuple[Any, Any]:
    result = scaler.value_and_grad(lambda weight: weight * gradient)(1.0)
    return result.dynamic_scale, result.finite


class Jmp:
    """``jmp.DynamicLossScale``: its ``adjust``, jitted, with its own min scale of 1, which no such step can change."""

    def __init__(self, policy: ScalerPolicy) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax.numpy
        import jmp  # noqa: F401 - here, and not in the first step, because it may be missing

        self.state = jax.numpy.float32(policy.scale), jax.numpy.int32(0)
        self.take = jax.jit(_jmp_step, static_argnames="period")
        self.period = policy.growth_interval

    @property
    def scale(self) -> float:
        return float(self.state[0])

    def step(self, overflow: bool) -> bool:
        self.state = self.take(*self.state, not overflow, period=self.period)
        return overflow


def _jmp_step(scale: Any, counter: Any, finite: Any, period: int) -> tuple[Any, Any]:
    import jmp

    scaler = jmp.DynamicLossScale(scale, counter, period).adjust(finite)
    return scaler.loss_scale, scaler.counter


class DeepSpeed:
    """``DynamicLossScaler`` of ``deepspeed.runtime.fp16.loss_scaler``, made as DeepSpeed's fp16 configuration does."""

    def __init__(self, policy: ScalerPolicy) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        with _quiet_import():
            from deepspeed.runtime.fp16 import loss_scaler

        loss_scaler.logger.setLevel(logging.WARNING)  # it announces every overflow
        # Its announcements ask for the rank, and so for a process group, which a single process may not have.
        self.alone = partial(mock.patch.object, loss_scaler.dist, "get_rank", return_value=0)
        self.scaler = loss_scaler.DynamicLossScaler(
            init_scale=policy.scale,
            scale_window=policy.growth_interval,
            min_scale=policy.min_scale,
            delayed_shift=policy.hysteresis,
            consecutive_hysteresis=False,
        )

    @property
    def scale(self) -> float:
        return float(self.scaler.loss_scale)

    def step(self, overflow: bool) -> bool:
        try:
            with self.alone():
                self.scaler.update_scale(overflow)
        except Exception as error:
            if "already at minimum" not in str(error):
                raise
            raise ScalerStopped from error
        return overflow


class Megatron:
    """``DynamicGradScaler`` of ``megatron.core.optimizer.grad_scaler``, its tensors on the CPU where they ask for a
    GPU."""

    def __init__(self, policy: ScalerPolicy) -> None:
        with _quiet_import():
            from megatron.core.optimizer.grad_scaler import DynamicGradScaler

        with _OnCpu():
            self.scaler = DynamicGradScaler(
                initial_scale=policy.scale,
                min_scale=policy.min_scale,
                growth_factor=2.0,
                backoff_factor=0.5,
                growth_interval=policy.growth_interval,
                hysteresis=policy.hysteresis,
            )

    @property
    def scale(self) -> float:
        return float(self.scaler.scale)

    def step(self, overflow: bool) -> bool:
        self.scaler.update(overflow)
        return overflow


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Keeps back what a library says about GPUs, and packages for GPUs, that it finds missing."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


class _OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that are asked for on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)
