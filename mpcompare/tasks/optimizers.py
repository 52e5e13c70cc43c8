"""The optimizers: each as torch's own, and as a replay in float64, with which the updates of a backend are compared.

The learning rate of a step is the optimizer's times the factor of the schedule (:mod:`mpcompare.tasks.schedules`).
Whoever drives a backend passes it to the step, and to the replay. CONTRIBUTING.md says how to add an optimizer.

A replay also says how far correct fp32 arithmetic may be from it. With fp32's unit roundoff ``u = 2^-24``, an operation
is off by at most ``u`` times its result, and so is a constant that is rounded to fp32. A sum, in whatever order it is
taken, is then off by at most ``n u`` times the sum of the absolute values of its terms, if each term is rounded at most
``n`` times on its way into it (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2). The absolute
values matter where terms cancel: their errors stay.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mpcompare.errors import BackendUnavailable, InputError, check_flag, check_number
from mpcompare.stored import Stored
from mpcompare.tasks.groups import Group, GroupedReplay, Parameters, for_torch, params_in, read_groups


class UpdateReplay(Protocol):
    """An optimizer in float64, tensor by tensor, on the gradients that a backend shows."""

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Takes the next update of the weight ``name``. A step that is skipped is no update.

        Args:
            grad, weight: float64, the weight as it is before the update.
            lr: learning rate of this step.

        Returns:
            ``change``, the difference between the new weight and the old one; and ``magnitude``, the sum of the
            absolute values of the change's terms, times the number of times that fp32 rounds them at most. So fp32 may
            be off by ``2^-24 magnitude`` in the change, and in addition by the rounding of the new weight.
        """

    def remember(self, name: str, tensors: Mapping[str, Tensor], updates: int, at_once: bool = False) -> None:
        """Goes on from a loaded state, with the tensors that it remembers of the weight ``name``: these tensors have
        no error.

        Args:
            tensors: by torch's names, float64; empty where nothing is remembered.
            updates: the number of updates that the state counts.
            at_once: whether the optimizer got that number from the state, and did not count to it.
        """

    def kept(self, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the tensors that are remembered of the weight ``name`` after its last update, by torch's names, each
        with its ``magnitude``: fp32 may be off by ``2^-24 magnitude`` in a tensor."""


@dataclass(frozen=True)
class Coarse:
    """An arithmetic that rounds by more than fp32 does, for the bounds of a replay."""

    arithmetic: float = 1.0  # the unit roundoff of operations, over fp32's
    # the unit roundoff of the optimizer's tensors, over fp32's; 0: storing them rounds nothing more
    moments: float = 0.0


IN_FP32 = Coarse()


class Optimizer(Protocol):
    """The way in which weights are updated, with the names of ``torch.optim``."""

    @property
    def lr(self) -> float:
        """The learning rate, of which the schedule takes a multiple."""

    @property
    def remembers(self) -> bool:
        """Whether a step depends on the ones before it."""

    @property
    def linear(self) -> bool:
        """Whether an update is linear in the gradients, so that its relative error is the gradients' error."""

    @property
    def bounded(self) -> bool:
        """Whether an update has a bound that follows from the learning rate and the sizes of the gradients."""

    def initial_state(self, like: Tensor) -> dict[str, Tensor]:
        """Returns the optimizer's state of a parameter before its first update, by torch's names: tensors of its shape
        and dtype, and ``step``, the number of updates, a 0-d fp32 tensor on the CPU."""

    def make(self, params: Parameters, fused: bool = False) -> torch.optim.Optimizer:
        """Returns torch's optimizer of parameters, which come with their names (``named_parameters()``) where groups
        shall be possible. ``fused`` makes it one kernel, which skips a step on the device where a ``GradScaler`` says
        so."""

    def replay(self, coarse: Coarse = IN_FP32) -> UpdateReplay:
        """Returns a new replay, before the first step; ``coarse`` says of which arithmetic, fp32's by default."""


@dataclass(frozen=True)
class Sgd:
    """``g = g + weight_decay w; v = momentum v + g; w = w - lr v``, as ``torch.optim.SGD`` has it. Raises InputError
    where an attribute has another value, or ``nesterov`` is without ``momentum``."""

    of_torch: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD
    linear: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    lr: float = 1e-3  # above 0, finite
    momentum: float = 0.0  # in [0, 1), 0 for none
    nesterov: bool = False  # ``w = w - lr (g + momentum v)`` instead (Sutskever et al., ICML 2013)
    weight_decay: float = 0.0  # finite, 0 for none
    groups: tuple[Group, ...] = ()  # parameters with values of their own (:mod:`mpcompare.tasks.groups`)

    def __post_init__(self) -> None:
        _check_common(self)
        check_number("task.optimizer.momentum", self.momentum, at_least=0, below=1)
        check_flag("task.optimizer.nesterov", self.nesterov)
        if self.nesterov and not self.momentum:
            raise InputError("task.optimizer.nesterov", self.nesterov, "needs a task.optimizer.momentum above 0")

    @property
    def remembers(self) -> bool:
        return self.momentum > 0

    def initial_state(self, like: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(like)} if self.momentum else {}

    def make(self, params: Parameters, fused: bool = False) -> torch.optim.SGD:
        optimizer = torch.optim.SGD(for_torch(self, params), **_settings(self), fused=fused or None)
        if fused and self.momentum:  # it would make them in the first step, and leave them unfilled if that is skipped
            for p in params_in(optimizer):
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return optimizer

    def replay(self, coarse: Coarse = IN_FP32) -> UpdateReplay:
        return GroupedReplay(self, coarse) if self.groups else SgdReplay(self, coarse)


class SgdReplay:
    """:class:`Sgd` in float64.

    fp32 rounds a gradient once between the place where a backend shows it and the place where it uses it, and twice
    with lr (lr itself, the product). The decay, Nesterov's sum and momentum are a constant, a product and a sum, three
    roundings each. Momentum's roundings come again in each step after the first, for the v of the step before.
    """

    def __init__(self, optimizer: Sgd, coarse: Coarse = IN_FP32) -> None:
        self.optimizer = optimizer
        self.roundings = 3 * coarse.arithmetic * (1 + (optimizer.weight_decay > 0) + optimizer.nesterov)
        self.roundings += coarse.moments
        self.of_momentum = 3 * coarse.arithmetic + coarse.moments
        self.velocities = Stored()  # v, and the sum of the absolute values of its terms, ``[2, *weight]``
        self.rounded: dict[str, float] = {}  # the number of roundings of each velocity

    def remember(self, name: str, tensors: Mapping[str, Tensor], updates: int, at_once: bool = False) -> None:
        if "momentum_buffer" in tensors:
            velocity = tensors["momentum_buffer"]
            self.velocities[name] = torch.stack((velocity, velocity.abs()))
            self.rounded[name] = self.roundings

    def kept(self, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        if name not in self.velocities or not self.optimizer.momentum:  # without momentum nothing is remembered
            return {}
        velocity, sizes = self.velocities[name]
        return {"momentum_buffer": (velocity, self.rounded[name] * sizes + 2.0**-102)}

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        momentum = self.optimizer.momentum
        grad, size = _decayed(grad, weight, self.optimizer.weight_decay)
        velocity, sizes, roundings = grad, size, self.roundings
        if momentum:
            if name in self.velocities:
                velocity, sizes = self.velocities[name]
                velocity, sizes = momentum * velocity + grad, momentum * sizes + size
                roundings = self.rounded[name] + self.of_momentum
            self.velocities[name], self.rounded[name] = torch.stack((velocity, sizes)), roundings
        if self.optimizer.nesterov:
            velocity, sizes = grad + momentum * velocity, size + momentum * sizes
        return -lr * velocity, roundings * lr * sizes


@dataclass(frozen=True)
class _AdamOrAdamW:
    """The part that :class:`Adam` and :class:`AdamW` share; neither is a kind of the other."""

    of_torch: ClassVar[type[torch.optim.Adam | torch.optim.AdamW]]
    decoupled: ClassVar[bool]
    linear: ClassVar[bool] = False
    lr: float = 1e-3  # above 0, finite
    betas: tuple[float, float] = (0.9, 0.999)  # the parts of m and of v that an update keeps, in [0, 1)
    eps: float = 1e-8  # above 0; without it a weight without a gradient would be updated by 0 / 0
    weight_decay: float = 0.0  # finite, 0 for none
    groups: tuple[Group, ...] = ()  # parameters with values of their own (:mod:`mpcompare.tasks.groups`)

    def __post_init__(self) -> None:
        _check_common(self)
        check_number("task.optimizer.eps", self.eps, above=0)
        betas: object = self.betas
        if (
            not isinstance(betas, (list, tuple))
            or len(betas) != 2
            or not all(isinstance(b, (int, float)) and not isinstance(b, bool) and 0 <= b < 1 for b in betas)
        ):
            expected = "expected two numbers of at least 0 and below 1, as in [0.9,0.999]"
            raise InputError("task.optimizer.betas", betas, expected)
        object.__setattr__(self, "betas", tuple(map(float, betas)))  # a list in YAML

    @property
    def remembers(self) -> bool:
        return any(self.betas)

    @property
    def bounded(self) -> bool:
        """Whether beta1 < sqrt(beta2) (Reddi, Kale and Kumar, ICLR 2018): else v forgets a large gradient before m
        does, m / sqrt(v) has no bound, and an element whose gradient is next to 0 may move by any distance."""
        beta1, beta2 = self.betas
        return beta1 == 0 or beta1**2 < beta2

    def initial_state(self, like: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": torch.zeros_like(like), "exp_avg_sq": torch.zeros_like(like), "step": torch.zeros(())}

    def make(self, params: Parameters, fused: bool = False) -> torch.optim.Adam | torch.optim.AdamW:
        return self.of_torch(for_torch(self, params), **_settings(self), fused=fused or None)

    def replay(self, coarse: Coarse = IN_FP32) -> UpdateReplay:
        return GroupedReplay(self, coarse) if self.groups else AdamReplay(self, coarse)


@dataclass(frozen=True)
class Adam(_AdamOrAdamW):
    """``w = w - lr m / (sqrt(v) + eps)``, as ``torch.optim.Adam`` has it (Kingma and Ba, arXiv 1412.6980); m and v are
    means of g and g^2 over the updates, in which older ones count less. ``weight_decay w`` is added to g, and so
    becomes part of m and v. Raises InputError where an attribute has another value."""

    of_torch = torch.optim.Adam
    decoupled = False


@dataclass(frozen=True)
class AdamW(_AdamOrAdamW):
    """:class:`Adam` whose weight decay is no part of m and v: ``w = w - lr (m / (sqrt(v) + eps) + weight_decay w)``, as
    ``torch.optim.AdamW`` has it (Loshchilov and Hutter, arXiv 1711.05101). Raises InputError as :class:`Adam` does."""

    of_torch = torch.optim.AdamW
    decoupled = True
    weight_decay: float = 1e-2


class AdamReplay:
    """:class:`Adam` and :class:`AdamW` in float64.

    With ``c = 1 - beta^t`` in update t, ``M`` as m of ``|g| + weight_decay |w|`` and ``S^2`` as v of its square::

        d = sqrt(v / c2) + eps        change = -lr (m / c1) / d

    An error ``e M`` of m and one of ``e S`` of sqrt(v) become one of ``e lr (M / c1 + |m| / c1 S / sqrt(c2) / d) / d'``
    in the change, with the d' that the second error leaves of d: ``m' / d' - m / d = (m' - m - (d' - d) m / d) / d'``.
    If no decay cancels a gradient, S is sqrt(v), and that is hardly more than ``2 e lr M / c1 / d``. If one does, and
    beta2 is so small that v forgets the ones before, d' may be as small as eps. The number of roundings e is:

    - Each update rounds the old m and v up to 4 times (``m + (1 - beta1) (g - m)``: the difference, the constant, the
      product, the sum; where beta1 is below 1/2 that would round more of m than is kept), and sqrt halves the error of
      v: 4 t for m, 2 t for v.
    - g is rounded once between being shown and being used, and 3 times with the decay: 4 for m. g^2 has twice as
      many, which sqrt halves: 4 for v.
    - The constant lr / c1, the product with it and the division by d: 3 for m. sqrt, the constant sqrt(c2), the
      division by it, eps and the sum with it: 5 for v. So 4 t + 8 is enough for both.
    - c is a difference of numbers next to 1. If beta and beta^t are fp32 numbers, as in a step that is captured or
      compiled (``capturable=True`` in torch), c is off by up to ``(t + 1) u``. That is ``(t + 1) / c1`` more for m, and
      half of ``(t + 1) / c2``, of which sqrt is taken, for v.
    - Where t was loaded and nothing was counted, as in the state of long training, beta^t is a power and no product of
      t fp32 numbers. It is off by t times the error of this beta in fp32, which is known, and by as much as a power is:
      4, and twice its exponent, ``t |ln beta|``. ``1 - beta`` in fp32 is off by ``beta / (1 - beta)`` times the same
      error, in the part of the mean that is new: all of m at most, and for v as much as it is. The means themselves are
      off by as much at most. torch's fused kernels on a GPU have beta in fp32 (so has the machine code of torch 2.11).
    - Below 2^-126 fp32 rounds to multiples of a constant, or to 0: ``u 2^-102`` in M, and its root ``u 2^-39`` in S.

    From a state that was loaded, t is the number of updates since then in all but the corrections.

    A coarser arithmetic rounds by so much more, except in the corrections, which torch computes in fp32 or better. An
    arithmetic that stores m and v with fewer digits rounds each once more in an update.

    The decay of AdamW multiplies w by the constant ``1 - lr weight_decay``, one rounding for each of the two.
    """

    def __init__(self, optimizer: _AdamOrAdamW, coarse: Coarse = IN_FP32) -> None:
        self.optimizer, self.coarse = optimizer, coarse
        self.means = Stored()  # m, M, v and S^2, ``[4, *weight]``; without S^2 where it equals v
        self.updates: dict[str, int] = {}
        self.loaded: dict[str, int] = {}  # the updates before the state that was loaded, which rounded nothing here
        self.at_once = False

    def remember(self, name: str, tensors: Mapping[str, Tensor], updates: int, at_once: bool = False) -> None:
        if "exp_avg" in tensors and "exp_avg_sq" in tensors:
            m, v = tensors["exp_avg"], tensors["exp_avg_sq"]
            self.means[name] = torch.stack((m, m.abs(), v))
            self.updates[name] = self.loaded[name] = updates
            self.at_once = at_once

    def kept(self, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        if name not in self.means:
            return {}
        m, M, v, S2 = self._means(name)
        t, arithmetic = self.updates[name] - self.loaded.get(name, 0), self.coarse.arithmetic
        of_m, of_v = (
            (4 * t + of_g) * arithmetic + t * self.coarse.moments + _of_one_minus(beta)
            for of_g, beta in zip((4, 8), self.optimizer.betas, strict=True)
        )
        return {"exp_avg": (m, of_m * M + 2.0**-102), "exp_avg_sq": (v, of_v * S2 + 2.0**-102)}

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        (beta1, beta2), decay = self.optimizer.betas, self.optimizer.weight_decay
        coupled = not self.optimizer.decoupled and decay > 0  # else the size is |g|, and S^2 is v
        grad, size = _decayed(grad, weight, decay if coupled else 0.0)
        new = (grad, size, grad.square(), size.square())[: 3 + coupled]
        kept = self._means(name) if name in self.means else (torch.zeros_like(grad),) * 4
        means = [
            beta * old + (1 - beta) * value
            for beta, old, value in zip((beta1, beta1, beta2, beta2), kept, new, strict=False)
        ]
        t = self.updates.get(name, 0) + 1
        self.means[name], self.updates[name] = torch.stack(means), t

        c1, c2 = self.corrections(t)
        m, M, v = (mean / c for mean, c in zip(means, (c1, c1, c2), strict=False))
        root, d = v.sqrt(), self.denominator(v, c2)
        rounded = t - self.loaded.get(name, 0)
        of_m = (4 * rounded + 8) * self.coarse.arithmetic + rounded * self.coarse.moments
        of_v: float | Tensor = of_m
        if self.at_once and rounded == 1:
            share = (1 - beta2) * grad.square() / means[2].clamp(min=1e-300)
            of_m += _of_constant(beta1, t) + _of_one_minus(beta1)
            of_v = of_v + _of_constant(beta2, t) / 2 + share * _of_one_minus(beta2) / 2
        else:
            of_m = of_v = of_m + (t + 1) * max(1 / c1, 0.5 / c2)
        change = -lr * m / d
        S = ((means[3] / c2).sqrt() if coupled else root) + 2.0**-39 / c2**0.5
        smallest = d - torch.minimum(2.0**-24 * of_v * S, root)
        magnitude = lr * (of_m * (M + 2.0**-102 / c1) + of_v * m.abs() * S / d) / smallest
        if self.optimizer.decoupled and decay:
            change = change - lr * decay * weight
            magnitude = magnitude + 2 * self.coarse.arithmetic * (1 + lr * decay) * weight.abs()
        return change, magnitude

    def _means(self, name: str) -> tuple[Tensor, ...]:
        means = self.means[name]
        return *means, *means[2:3].expand(4 - len(means), *means.shape[1:])

    def corrections(self, t: int) -> tuple[float, float]:
        """Returns the divisors of m and v in update ``t``, 1 for the first: both start at 0, and are too small at
        first."""
        return 1 - self.optimizer.betas[0] ** t, 1 - self.optimizer.betas[1] ** t

    def denominator(self, v: Tensor, c2: float) -> Tensor:
        """Returns ``d`` of a ``v`` that is divided by ``c2`` already."""
        return v.sqrt() + self.optimizer.eps


OPTIMIZERS = (Sgd, Adam, AdamW)
OF_TORCH: dict[type, Any] = {each.of_torch: each for each in OPTIMIZERS}


def require_known(optimizer: Optimizer, who: str) -> Sgd | Adam | AdamW:
    """Returns the optimizer, or raises BackendUnavailable where it is none of these three: ``who`` knows no other."""
    if not isinstance(optimizer, (Sgd, Adam, AdamW)):
        name = getattr(optimizer, "name", type(optimizer).__name__)
        raise BackendUnavailable(f"{who} knows SGD, Adam and AdamW, not {name}")
    return optimizer


def _of_constant(beta: float, t: int) -> float:
    """Returns how often ``1 - beta^t`` is rounded if beta and its power are fp32 numbers."""
    power = beta**t
    return (t * _of_fp32(beta) + 4 - 2 * t * math.log(beta)) * power / (1 - power) + 1 if power else 0.0


def _of_one_minus(beta: float) -> float:
    """Returns how often ``1 - beta`` is rounded if beta is an fp32 number."""
    return _of_fp32(beta) * beta / (1 - beta)


def _of_fp32(beta: float) -> float:
    """Returns the relative error of a number in fp32, in units of ``2^-24``."""
    return abs(torch.tensor(beta, dtype=torch.float32).item() / beta - 1) * 2**24 if beta else 0.0


def _settings(optimizer: Any) -> dict[str, Any]:
    """Returns an optimizer's attributes by torch's names, but for its groups."""
    return {field.name: getattr(optimizer, field.name) for field in fields(optimizer) if field.name != "groups"}


def _decayed(grad: Tensor, weight: Tensor, weight_decay: float) -> tuple[Tensor, Tensor]:
    """Returns the gradient with the coupled decay in it, and the sum of the absolute values of both."""
    if not weight_decay:
        return grad, grad.abs()
    return grad + weight_decay * weight, grad.abs() + weight_decay * weight.abs()


def _check_common(optimizer: Any) -> None:
    """Checks the attributes that all optimizers have, and reads the groups of a configuration."""
    check_number("task.optimizer.lr", optimizer.lr, above=0)
    check_number("task.optimizer.weight_decay", optimizer.weight_decay, at_least=0)
    object.__setattr__(optimizer, "groups", read_groups(optimizer.groups))
