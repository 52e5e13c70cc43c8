"""Networks on another device than the CPU: the copies of a look lie on the CPU, and come back to be compared.

Without a GPU the copies are the tensors on another device. A function that is given a copy that has not come back, and
a tensor of the network, raises an error, as on a GPU.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.watched_loops import Loop, small_network, spoil
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map_only

import mpcompare
from mpcompare.dtypes import rounded_to
from mpcompare.instruments import fp32_products
from mpcompare.precision import TF32
from mpcompare.testing import assert_same_training
from mpcompare.watching import spool
from mpcompare.watching.spool import Spool

META = torch.device("meta")


class Far(Tensor):
    """A tensor with numbers, whose device is called ``meta``."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "Far":
        made = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype, device=META)
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        if func is torch.ops.aten._to_copy.default and kwargs.get("device", META) != META:
            return func(args[0].numbers, **kwargs)
        if func is not torch.ops.aten.copy_.default and not all(isinstance(t, Far) or not t.dim() for t in given):
            raise RuntimeError(f"{func.name()} is given tensors on several devices")
        kwargs.pop("device", None)
        result = func(*tree_map_only(Far, lambda t: t.numbers, args), **tree_map_only(Far, lambda t: t.numbers, kwargs))
        return tree_map_only(Tensor, lambda t: Far(t) if t.dim() else t, result)


@pytest.fixture
def far_copies(monkeypatch):
    """Lets all copies be on another device than the network."""
    kept = Spool.copy

    def copied(self: Spool, tensor: Tensor) -> Tensor:
        made = Far(kept(self, tensor))
        self._devices[made] = tensor.device
        return made

    monkeypatch.setattr(spool, "SMALL", 0)
    monkeypatch.setattr(Spool, "copy", copied)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 1, 8, 8), torch.randint(10, (16,))


WITH_NORM = Loop(make=convolutions, batch=images, updates=2)
WITH_DROPOUT = replace(Loop(), updates=1, loss=lambda z, y: F.cross_entropy(F.dropout(z), y))


@pytest.mark.slow
@pytest.mark.parametrize("loop", [replace(Loop(), dtype=torch.float16), WITH_NORM, WITH_DROPOUT])
def test_a_right_loop_has_no_defect(loop, far_copies):
    seen = loop.run(mpcompare.watch)
    assert (seen.defects, seen.not_examined) == ([], [])
    assert all({**seen.sight.layers, **seen.sight.parameters}.values())


def test_two_loops_are_compared(far_copies):
    assert_same_training(replace(WITH_NORM).run, replace(WITH_NORM).run, steps=2)


@pytest.mark.slow
def test_a_wrong_gradient_is_found(far_copies):
    def spoilt():
        net = small_network()
        spoil(net[2].weight, lambda g: 0.9 * g)
        return net

    assert Loop(make=spoilt).run(mpcompare.watch).defects[0].place == "2.weight"


class Product(torch.autograd.Function):
    """A convolution whose products round their operands to TF32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(rounded_to(x, TF32), rounded_to(weight, TF32), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        coarse, x32, w32 = (rounded_to(t, TF32) for t in (grad, x, weight))
        down = torch.nn.grad.conv2d_input(x.shape, w32, coarse)
        return down, torch.nn.grad.conv2d_weight(x32, weight.shape, coarse), grad.sum((0, 2, 3))


class Convolution(nn.Conv2d):
    """Computes in TF32 as a GPU does, but not where a replay computes in float64."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype is torch.float32:
            return Product.apply(x, weight, bias)
        return super()._conv_forward(x, weight, bias)


@pytest.mark.parametrize("is_gpu", [True, False])
def test_products_in_tf32_are_a_precision_of_their_own(is_gpu, monkeypatch):
    """On a GPU torch computes convolutions in TF32 by itself. TF32 is a fact there, and an error on a CPU."""
    monkeypatch.setattr(fp32_products, "are_tf32", lambda network, device: is_gpu)
    made = lambda: nn.Sequential(Convolution(1, 4, 3), *convolutions()[1:])  # noqa: E731
    seen = replace(WITH_NORM, dtype=torch.float32, make=made).run(mpcompare.watch)
    assert seen.facts["precision"] == ("tf32" if is_gpu else "fp32")
    assert {d.place for d in seen.defects} == (set() if is_gpu else {"0", "0.weight"})
