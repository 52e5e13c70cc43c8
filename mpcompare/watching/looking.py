"""Looks on while a loop trains: hooks on its network and its optimizers, and a mode that sees each function of torch.

Nothing that the loop computes is changed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from mpcompare.dtypes import dtype_name
from mpcompare.loss_scale import LossScale
from mpcompare.verdict.examine.forced.record import Hook
from mpcompare.verdict.examine.numerics import spread, total_norm
from mpcompare.watching import scalers
from mpcompare.watching.attach import Attached
from mpcompare.watching.scalers import ScaleChange
from mpcompare.watching.steps import Taken
from mpcompare.watching.sums import Sums
from mpcompare.watching.tape import Called

BACKWARD = (Tensor.backward, torch.autograd.backward)


class Look(TorchFunctionMode):
    """Everything that is seen of a loop.

    Attributes:
        sums: of the gradients.
        taken: the steps of the optimizers, in their order.
        scaler: the one that multiplied the loss, or that called ``step``; None where none did.
        policy: that of the scaler, as it was when it was found; None where it is none of ours.
        scales: the calls of its ``update``.
    """

    def __init__(self, attached: Attached, done: Callable[[], None]) -> None:
        super().__init__()
        self.attached, self.network, self._done = attached, attached.network, done
        self.sums = Sums(attached.network)
        self.params = self.sums.params
        self.taken: list[Taken] = []
        self.scaler: Any = None
        self.policy: LossScale | None = None
        self.scales: list[ScaleChange] = []
        self._handles: list[RemovableHandle] = []
        self._on = self._entered = self._left = False
        self._inside = 0  # calls of the network under way
        self._called: Called | None = None
        self._step: Taken | None = None  # under way
        self._scaling = self._unscaled = self._by_scaler = False

    def start(self) -> None:
        """Puts the hooks on."""
        outer = self.attached.outer
        before, after = Hook(outer, self._call), Hook(outer, self._returned)
        self._handles = [outer.register_forward_pre_hook(before, with_kwargs=True, prepend=True)]
        if not self.attached.compiled:
            self._handles += self.sums.recorder.attach(self.network)
        self._handles.append(outer.register_forward_hook(after, with_kwargs=True, always_call=True))
        for name, optimizer in self.attached.optimizers.items():
            self._handles += [
                optimizer.register_step_pre_hook(partial(self._before, name)),
                optimizer.register_step_post_hook(partial(self._after, name)),
            ]
        scalers.look(self)
        self._on = self._entered = True
        self.sums.noted.__enter__()
        self.__enter__()

    def stop(self) -> None:
        """Takes them off. The modes are left where nobody has entered another one since; else they do nothing."""
        if self._on:
            self._on = False
            for handle in self._handles:
                handle.remove()
            scalers.look_away(self)
            self.sums.forget()
        if self._entered and self._is_on_top():
            self._entered = False
            self.__exit__(None, None, None)
            self.sums.noted.__exit__(None, None, None)

    def _is_on_top(self) -> bool:
        stack = _get_current_function_mode_stack()
        return bool(stack) and stack[-1] is self

    # Calls of the network

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1
        if self._inside > 1 or torch._C._current_graph_task_id() != -1:
            return
        self._called = self.sums.call(module, (args, kwargs)) if torch.is_grad_enabled() else None
        self._left = self._is_on_top()
        if self._left:  # a compiler would look through a mode
            self.__exit__(None, None, None)

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self._inside -= 1
        if self._inside or torch._C._current_graph_task_id() != -1:
            return
        if self._left:
            self.__enter__()
        if self._called is not None and result is not None:
            self.sums.returned(self._called, result, self.attached.compiled)
        self._called = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._on or self._inside or self._step or torch._C._current_graph_task_id() != -1:
            return func(*args, **kwargs)
        if func in BACKWARD:
            self._unscaled = False
            return self.sums.backward(func, args, kwargs)
        if self.sums.places:
            self.sums.touched(func, args)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            self.sums.hide("the loop asks for gradients by torch.autograd.grad")
            return func(*args, **kwargs)
        return self.sums.tape.note(func, args, kwargs, self._scaling)

    # Steps

    def _before(self, name: str, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Looks at what an optimizer is given; where a closure makes that, at the end of the closure."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._given(name)
            return None

        def called() -> Any:
            result = closure()
            if self._step is None:
                self._given(name)
            else:
                self._step.closures += 1
            return result

        others = {key: value for key, value in kwargs.items() if key != "closure"}
        return (args[0], called, *args[2:]), others

    def _given(self, name: str) -> None:
        optimizer, taken, by = self.attached.optimizers[name], self._taken(name), 1.0
        if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # a fused one unscales by itself
            by, taken.unscaled = 1.0 / float(scale), True
        found = {n: p.grad for n, p in self._owned(name) if p.grad is not None}
        taken.given = {n: spread(g) * by for n, g in found.items()}
        taken.finite = all(bool(g.isfinite().all()) for g in found.values())
        taken.by_scaler = self._by_scaler
        self._step = taken

    def _taken(self, name: str) -> Taken:
        """Returns a step that an optimizer is about to take."""
        total, owned, optimizer = self.sums.close(), self._owned(name), self.attached.optimizers[name]
        settings: dict[str, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            shared = {key: _number(value) for key, value in group.items() if key != "params"}
            settings |= {self.sums.names[id(p)]: shared for p in group["params"] if id(p) in self.sums.names}
        grads = {n: g for n, g in total.grads.items() if n in settings} if total else {}
        return Taken(
            optimizer=name,
            sum=total,
            settings=settings,
            raw={n: spread(g) for n, g in grads.items()},
            norms={n: total_norm({n: g}, 2.0) for n, g in grads.items()},
            called={n: self.sums.called[n] for n, _ in owned if n in self.sums.called},
            before={n: spread(p) for n, p in owned},
            state={n: _state(optimizer, p) for n, p in owned},
            scale=scalers.scale_of(self.scaler) if self.scaler is not None else 1.0,
            scaled=total is not None and total.scaled,
            unscaled=self._unscaled,
            order=list(self.sums.order),
            dtypes={n: dtype_name(p.dtype) for n, p in owned},
        )

    def _owned(self, name: str) -> list[tuple[str, Tensor]]:
        params = [p for group in self.attached.optimizers[name].param_groups for p in group["params"]]
        return [(self.sums.names[id(p)], p) for p in params if id(p) in self.sums.names]

    def _after(self, name: str, optimizer: Any, args: Any, kwargs: Any) -> None:
        if (taken := self._step) is not None:
            self._step = None
            inf = getattr(optimizer, "found_inf", None)  # of a fused one
            taken.skipped = inf is not None and bool(inf)
            self._finish(taken)

    def _finish(self, taken: Taken) -> None:
        optimizer, owned = self.attached.optimizers[taken.optimizer], self._owned(taken.optimizer)
        taken.after = {n: spread(p) for n, p in owned}
        taken.state_after = {n: _state(optimizer, p) for n, p in owned}
        self.sums.stepped(taken.skipped)
        self.taken.append(taken)
        self._done()

    # The scaler

    def of_scaler(self, scaler: Any, method: str, call: Callable[[], Any], args: Any) -> Any:
        """Is told of each call of a scaler: see :class:`mpcompare.watching.scalers.Looker`."""
        if method == "scale":
            self._found(scaler, self.scaler is None)
            self._scaling = True
            try:
                return call()
            finally:
                self._scaling = False
        if method == "update":
            return self._updated(scaler, call, args)
        name = self.attached.name_of(args[0] if args else None)
        if name is None:
            return call()
        self._found(scaler, self.scaler is not scaler)
        if method == "unscale_":
            self.sums.keep()
            self._unscaled = True
            return call()
        count, self._by_scaler = len(self.taken), True
        try:
            result = call()
        finally:
            self._by_scaler = False
        if len(self.taken) == count and self._on:  # no hook was called: it was left out
            taken = self._taken(name)
            taken.skipped, taken.by_scaler = True, True
            taken.finite = not scalers.found_inf(scaler, self.attached.optimizers[name])
            self._finish(taken)
        return result

    def _found(self, scaler: Any, is_new: bool) -> None:
        if is_new:
            self.scaler, self.policy, self.scales = scaler, scalers.policy_of(scaler), []

    def _updated(self, scaler: Any, call: Callable[[], Any], args: Any) -> Any:
        if scaler is not self.scaler:
            return call()
        before, inf = scalers.scale_of(scaler), scalers.any_found_inf(scaler)
        result = call()
        self.scales.append(ScaleChange(before, scalers.scale_of(scaler), inf, bool(args) and args[0] is not None))
        return result


def _state(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Any]:
    """Returns what an optimizer remembers of a parameter: some elements of each tensor of its shape."""
    return {
        kind: spread(v) if isinstance(v, Tensor) and v.shape == p.shape and v.dim() else _number(v)
        for kind, v in optimizer.state.get(p, {}).items()
        if isinstance(v, (Tensor, int, float))
    }


def _number(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
