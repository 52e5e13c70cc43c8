"""Follows the steps of the optimizers, and the scaler that has them taken."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcompare.dtypes import dtype_name
from mpcompare.generators import DeviceGenerator
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.groups import params_in
from mpcompare.verdict.examine.forced.choices import in_backward
from mpcompare.verdict.examine.numerics import numbers, total_norm
from mpcompare.verdict.examine.seen import all_finite
from mpcompare.verdict.examine.unseen import Unseen
from mpcompare.watching import scalers
from mpcompare.watching.alone import Original, is_plain
from mpcompare.watching.attach import Attached
from mpcompare.watching.events import Root
from mpcompare.watching.guard import Guard
from mpcompare.watching.scalers import ScaleChange
from mpcompare.watching.steps import Taken
from mpcompare.watching.sums import Sums
from mpcompare.watching.tape import given


class Steps:
    """The steps of the optimizers of a loop."""

    def __init__(self, attached: Attached, sums: Sums, guard: Guard, done: Callable[[], None]) -> None:
        self.attached, self.sums, self.guard, self._done = attached, sums, guard, done
        self.own = {name: Original.of(optimizer) for name, optimizer in attached.optimizers.items()}
        self.taken: list[Taken] = []
        self.step: Taken | None = None  # the step that is under way
        self.scaler: Any = None  # the scaler that multiplied the loss, or that called ``step``
        self.policy: LossScale | None = None  # the scaler's policy when the scaler was found; None: not one of ours
        self.scales: list[ScaleChange] = []  # the calls of the scaler's ``update``
        self.scaling = False  # whether the scaler multiplies a loss at the moment
        self._multiplied = False  # whether it has multiplied one since its last ``update``
        self._unscaled: set[str] = set()  # the optimizers whose gradients the scaler has divided
        self._by_scaler = False  # whether the scaler calls ``step``
        self._generator = DeviceGenerator(next(iter(sums.params.values())).device)
        self._drawn = self._generator.get()  # the generator's state before the step that is under way

    def before(self, name: str, args: Any, kwargs: Any) -> Any:
        """Looks at the gradients that an optimizer is given. If a closure makes them, it looks after the closure."""
        closure = given(args, kwargs, 1, "closure")
        if not callable(closure):  # somebody's own optimizer may be given another value
            self._given(name)
            return None

        def called() -> Any:
            result = closure()
            self.guard(self._closed, name)
            return result

        return (args, {**kwargs, "closure": called}) if "closure" in kwargs else ((args[0], called, *args[2:]), kwargs)

    def _closed(self, name: str) -> None:
        if self.step is None:
            self._given(name)
        else:
            self.step.closures += 1

    def _given(self, name: str) -> None:
        optimizer, taken, by = self.attached.optimizers[name], self._taken(name), 1.0
        if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # a fused optimizer unscales by itself
            by, taken.unscaled = 1.0 / float(scale), True
        found = {n: p.grad for n, p in self._owned(name) if p.grad is not None}
        with torch.no_grad(), Unseen():
            taken.given = {n: self.sums.spool.some(g, by) for n, g in found.items()}
            taken.finite = all_finite(found)
            if taken.asked is not None and found:
                taken.norm = total_norm({n: numbers(g) for n, g in found.items()}, 2.0) * by
        taken.row_by_row = frozenset(n for n, g in found.items() if g.is_sparse and not g.is_coalesced())
        taken.by_scaler = self._by_scaler
        self.step, self._drawn = taken, self._generator.get()

    def _taken(self, name: str) -> Taken:
        """Returns a step that an optimizer is about to take."""
        owned, optimizer = self._owned(name), self.attached.optimizers[name]
        total = None if in_backward() else self.sums.close({n for n, _ in owned})
        settings: dict[str, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            shared = {key: _number(value) for key, value in group.items() if key != "params"}
            settings |= {name: shared for name, _ in self._named(group["params"])}
        scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        by_hand = total is not None and scale != 1 and any(factor == scale for factor, _ in total.factors())
        return Taken(
            optimizer=name,
            sum=total,
            settings=settings,
            called={n: self.sums.calls.called[n] for n, _ in owned if n in self.sums.calls.called},
            before={n: self.sums.spool.some(p) for n, p in owned},
            state={n: self._state(optimizer, p) for n, p in owned},
            scale=scale,
            scaled=by_hand or (total is not None and total.scaled),
            scales_another=self._multiplied,
            unscaled=name in self._unscaled,
            order=list(self.sums.order),
            clip=next((self.sums.clips[n] for n, _ in owned if n in self.sums.clips), None),
            dtypes={n: dtype_name(p.dtype) for n, p in owned},
            in_backward=in_backward(),
        )

    def _owned(self, name: str) -> list[tuple[str, Tensor]]:
        return self._named(params_in(self.attached.optimizers[name]))

    def _named(self, params: list[Tensor]) -> list[tuple[str, Tensor]]:
        """Returns those parameters of an optimizer that are weights of the network, or their masters, by name."""
        names = self.sums.names
        return [(names[id(p)], p) for p in params if id(p) in names]

    def after(self, name: str) -> None:
        """Looks at what an optimizer has made."""
        if (taken := self.step) is not None:
            self.step, taken.drew = None, not torch.equal(self._drawn, self._generator.get())
            inf = getattr(self.attached.optimizers[name], "found_inf", None)  # a fused optimizer has it
            taken.skipped = inf is not None and bool(inf)
            self._finish(taken)

    def _finish(self, taken: Taken) -> None:
        optimizer, owned = self.attached.optimizers[taken.optimizer], self._owned(taken.optimizer)
        taken.after = {n: self.sums.spool.some(p) for n, p in owned}
        taken.state_after = {n: self._state(optimizer, p) for n, p in owned}
        self.sums.stepped(taken.after, taken.skipped)
        self.taken.append(taken)
        self._done()

    def _state(self, optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Any]:
        """Returns what an optimizer remembers of a parameter: some elements of each tensor of its shape."""
        return {
            kind: self.sums.spool.some(v) if isinstance(v, Tensor) and v.shape == p.shape and v.dim() else _number(v)
            for kind, v in optimizer.state.get(p, {}).items()
            if isinstance(v, (Tensor, int, float))
        }

    def passed(self, root: Root) -> None:
        """Is told of a ``backward`` that has come to its end: what it has added is not divided by the loss scale."""
        self._unscaled -= {name for name in self._unscaled if any(n in root.gives for n, _ in self._owned(name))}

    # The scaler

    def of_scaler(self, scaler: Any, method: str, call: Callable[[], Any], first: Any) -> Any:
        """Is told of each call of a scaler: see ``Looker`` in scalers.py."""
        was = self.scaling, self._by_scaler
        end = self.guard(self._called, scaler, method, first)
        try:
            result = call()
        finally:
            self.scaling, self._by_scaler = was
        if end is not None:
            self.guard(end)
        return result

    def _called(self, scaler: Any, method: str, first: Any) -> Callable[[], None] | None:
        """Begins a call of a scaler, and returns what is to be done at its end."""
        if method == "update":
            if scaler is not self.scaler:
                return None
            scale, inf = float(scaler.get_scale()), scalers.found_inf(scaler)
            return partial(self._updated, scaler, scale, inf, first is not None)
        if method == "scale":
            self._found(scaler, self.scaler is None)
            self.scaling = self._multiplied = True
            return None
        if (name := self.attached.name_of(first)) is None:
            return None
        self._found(scaler, self.scaler is not scaler)
        if method == "unscale_":
            self.sums.left.keep()
            self._unscaled.add(name)
            return None
        self._by_scaler = True
        return partial(self._left_out, scaler, name, len(self.taken))

    def _found(self, scaler: Any, is_new: bool) -> None:
        if is_new:
            self.scaler, self.policy, self.scales = scaler, scalers.policy_of(scaler), []

    def _left_out(self, scaler: Any, name: str, count: int) -> None:
        """Notes a step that a scaler has left out, so that no hook of the optimizer was called."""
        if len(self.taken) == count:
            taken = self._taken(name)
            taken.skipped, taken.by_scaler = True, True
            taken.finite = not scalers.found_inf(scaler, self.attached.optimizers[name])
            self._finish(taken)

    def _updated(self, scaler: Any, scale: float, inf: bool, given: bool) -> None:
        self._multiplied = False
        self.scales.append(ScaleChange(scale, float(scaler.get_scale()), inf, given))


def _number(value: Any) -> Any:
    """Returns a copy of a value that an optimizer may change in place."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value) if is_plain(value) else value
