"""Looks on while a loop trains: hooks on its network and its optimizers, and a mode that sees each function of torch.

Nothing that the loop computes is changed, and no error of the watch itself comes to the loop.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from mpcompare.verdict.examine.forced.choices import beside_the_network, in_backward
from mpcompare.verdict.examine.forced.module_hooks import Hook, HooksOn, put_on, takes_hooks
from mpcompare.verdict.examine.forced.recorder import is_transformed
from mpcompare.verdict.examine.forced.weights import backward
from mpcompare.watching import modes, own_functions, scalers
from mpcompare.watching.attach import Attached, alive
from mpcompare.watching.derivatives import Derivatives
from mpcompare.watching.events import Called, Root
from mpcompare.watching.guard import Guard
from mpcompare.watching.stepping import Steps
from mpcompare.watching.steps import Sum
from mpcompare.watching.sums import CLIPPING, Sums, begins_at
from mpcompare.watching.tape import given

PLAIN = (Tensor, torch.dtype, torch.device, int, float, bool, str, type(None))  # what a tape can hand on once more
BACKWARD = (Tensor.backward, torch.autograd.backward)
GRADIENTS = (*BACKWARD, torch.autograd.grad)
# Layers that compute in another way while a mode is entered: in evaluation and without gradients they have a fast path.
# A loop may have a teacher with such layers, and the watch must change none of its bits.
FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class Look(TorchFunctionMode):
    """Everything that is seen of a loop."""

    def __init__(self, attached: Attached, done: Callable[[], None]) -> None:
        super().__init__()
        self.attached, self.network = attached, attached.network
        self.guard = Guard()  # calls each part of the look
        self.sums = Sums(attached, self.guard)
        self.steps = Steps(attached, self.sums, self.guard, done)
        self.params, self.taken = self.sums.params, self.steps.taken
        self.derivatives = Derivatives()  # the derivatives of the user's own functions; the replays of the sums fill it
        self._hooks: HooksOn = {}  # the hooks on modules that the loop may call
        self._put = ExitStack()  # takes off, at the end, everything that is put on
        self.on = self.entered = self._left = False  # on: whether it is under way
        self._inside = 0  # calls of the network under way
        self._notes = False  # whether the mode of operators is on for the call of the network alone
        self._fast = 0  # calls of layers with a fast path under way since the modes were left
        self._called: Called | None = None

    def start(self) -> None:
        """Puts the hooks on, and enters the modes; nothing stays on where an error stops it."""
        self.on = self.entered = True
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        if self.attached.eager:
            self._put.enter_context(torch.compiler.set_stance("force_eager"))
        if not self.attached.hides_layers:
            self._put.enter_context(own_functions.told(self._own))
        self._put.callback(self.sums.calls.recorder.detach)
        self._put.callback(self._put_on, [])
        self._put_on(self._called_by_the_loop())
        self._look_at_fast_paths()
        self._put.enter_context(scalers.told(self.steps.of_scaler))
        self._enter()

    def _put_on(self, called: list[tuple[str, nn.Module]]) -> None:
        """Puts hooks on modules that the loop may call, and on all layers, where they are not yet."""
        if called and not self.attached.hides_layers:
            self.sums.calls.recorder.attach(self.network)
        put_on(self._hooks, called, self._hooks_on)

    def _hooks_on(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        """Puts hooks around the recorder's on a module, and returns their handles."""
        before, after = Hook(module, partial(self._call, name)), Hook(module, self._returned)
        return [
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def _renew(self) -> None:
        """Puts hooks on modules that the network has got since, such as adapters, and finds its new parameters."""
        calls, params = self.sums.calls, dict(self.network.named_parameters())
        has_new = any(id(params[name]) not in calls.names for name in self.attached.owned())
        if has_new or params.keys() != calls.params.keys():
            calls.renew(params)
        if self._hooks.keys() != set(called := self._called_by_the_loop()):
            self._put_on(called)

    def _called_by_the_loop(self) -> list[tuple[str, nn.Module]]:
        """Returns the modules that a loop may call, with the names that the network has for them: the network within
        its wrappers, and its parts, such as an encoder and a decoder."""
        called = list(self.attached.models.items())
        if not self.attached.hides_layers:
            parts = list(self.network.named_modules())
            called = parts + [each for each in called if each not in parts]
        return [each for each in called if takes_hooks(each[1])]

    def stop(self) -> None:
        """Takes the hooks off, and leaves the modes. Modes cannot be left within backward: they do nothing from then
        on, and a caller that stops there stops again later."""
        noted = self.sums.calls.noted
        if self.on:
            self.on = noted.on = False
            self._put.close()
            self.sums.forget()
            self.sums.calls.recorder.copies.end()
        if self.entered and torch._C._current_graph_task_id() == -1:
            modes.leave(noted)
            self.entered = not modes.leave(self)

    def used(self) -> list[Sum]:
        """Returns the sums of gradients that updates were made with, in their order."""
        return list(dict.fromkeys(t.sum for t in self.taken if t.sum is not None and not t.skipped))

    def _leave(self) -> bool:
        """Leaves both modes for a layer outside the network. Returns False if somebody has entered another mode."""
        noted = self.sums.calls.noted
        if not modes.is_on_top(self) or not modes.is_on_top(noted) or self._inside or not self.on:
            return False
        return modes.leave(self) and modes.leave(noted)

    def _enter(self) -> None:
        modes.enter(self.sums.calls.noted)
        modes.enter(self)

    def _look_at_fast_paths(self) -> None:
        """Puts hooks on all modules if a layer has a fast path: the loop may copy the network to have a teacher."""
        if any(True for _ in alive(*FAST)):
            self._put.enter_context(register_module_forward_pre_hook(self._call_fast))
            self._put.enter_context(register_module_forward_hook(self._returned_fast, always_call=True))

    def _call_fast(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if isinstance(module, FAST) and (self._fast or (not torch.is_grad_enabled() and self._leave())):
            self._fast += 1

    def _returned_fast(self, module: nn.Module, args: Any, result: Any) -> None:
        if isinstance(module, FAST) and self._fast and not torch.compiler.is_compiling():
            self._fast -= 1
            if not self._fast and self.on:
                self._enter()

    # Calls of the network

    def _call(self, part: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1
        if self._inside > 1 or in_backward():
            return
        self.guard(self._renew)
        self.sums.calls.count += 1
        noted = self.sums.calls.noted
        given, self._called = (args, kwargs), None
        if is_transformed():
            self.sums.calls.hide("the network is called by a function of torch.func")
        elif torch.is_grad_enabled():
            self._called = self.guard(self.sums.calls.begin, part, module, given)
        self._left = modes.is_on_top(self) and modes.leave(self)  # a compiler would look through a mode
        self._notes = self.on and noted not in modes.stack_of(noted)
        if self._notes:  # a hook of a backward calls us
            modes.enter(noted)

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self._inside -= 1
        if self._inside or in_backward():
            return
        if self._notes:
            modes.leave(self.sums.calls.noted)
        if self._left and self.on:
            modes.enter(self)
        if self._called is not None and result is not None:
            self.guard(self.sums.calls.end, self._called, result, self.attached.hides_layers)
        self._called = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a compiler looks through this mode
            return func(*args, **kwargs)
        args, kwargs = self.sums.calls.recorder.copies.stand_in(func, args, kwargs)
        seen = self._is_of_loop() and not _without_numbers(args)
        end = self.guard(self._begins, func, args, kwargs) if seen else None
        try:
            is_beside = seen and end is None and func in BACKWARD
            with self._unnoted() if func in GRADIENTS else nullcontext():
                result = self._beside(func, args, kwargs) if is_beside else func(*args, **kwargs)
        except Exception:
            if end is not None and func in GRADIENTS:
                self.guard(self.sums.stopped)
            raise
        if end is not None:
            self.guard(end, result)
        elif is_beside:  # as of a discriminator that is not watched: its graph is gone
            self.guard(self.sums.calls.tape.drop_lost)
        return result

    def _beside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Takes a backward that does not come to the network. A hook in it may call the network, and take a backward of
        its own, as the cached losses of sentence-transformers do. So this mode is on in that hook."""
        tensors, gradients = begins_at(args, kwargs)
        retains, again, inputs = (
            given(args, kwargs, at, n) for at, n in enumerate(("retain_graph", "create_graph", "inputs"), 2)
        )
        plainly = (
            again
            or inputs is not None
            or any(g is None and t.numel() != 1 for t, g in zip(tensors, gradients, strict=True))
        )
        with beside_the_network():
            if plainly:
                return func(*args, **kwargs)
            with self:  # torch has taken it off
                return backward(tensors, gradients, bool(retains))

    @contextmanager
    def _unnoted(self) -> Iterator[None]:
        """Takes the mode of operators off for a backward pass. While any such mode is entered, torch computes some
        derivatives, such as the derivative of ``prod``, by other formulas, which have other roundings."""
        noted = self.sums.calls.noted
        left = modes.is_on_top(noted) and modes.leave(noted)
        try:
            yield
        finally:
            if left and self.on:
                modes.enter(noted)

    def _is_of_loop(self) -> bool:
        """Returns whether the loop's own code calls a function."""
        busy = self._inside or self.steps.step or self.guard.calls or own_functions.is_called() or is_transformed()
        return self.on and not busy and not in_backward()

    def _own(self, function: type[Function], args: tuple[Any, ...]) -> own_functions.Ended | None:
        """Is told of a function of the user's own before it is called, and returns what is to be told of its result."""
        if not self._is_of_loop() or not all(isinstance(each, PLAIN) for each in tree_leaves(args)):
            return None
        begun = self.guard(self.sums.calls.tape.begin, function, args, {}, self.steps.scaling)
        return partial(self.guard, self.sums.calls.tape.end_own, begun[0]) if begun is not None else None

    def _begins(self, func: Any, args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        """Is told of a function that is called next, and returns what is to be told of its result."""
        if func in BACKWARD:
            root = self.sums.backward(args, kwargs)
            return partial(self._passed, root) if root is not None else None
        if func is torch.autograd.grad:
            return self.sums.asks(args, kwargs)
        if self.sums.left.places or func in CLIPPING:
            self.sums.touched(func, args, kwargs)
        if not torch.is_grad_enabled():
            return None
        if func is Tensor.register_hook and not args[0].is_leaf and self.sums.calls.tape.depends(args[0]):
            self.sums.calls.hide("hooks of the loop may change gradients above the network")
            return None
        begun = self.sums.calls.tape.begin(func, args, kwargs, self.steps.scaling)
        return partial(self.sums.calls.tape.end, *begun) if begun is not None else None

    def _passed(self, root: Root, _: Any) -> None:
        """Is told that ``backward`` has come to its end."""
        self.sums.passed(root)
        self.steps.passed(root)


def _without_numbers(args: Any) -> bool:
    """Returns whether a function is called with a compiler's stand-ins for tensors."""
    return any(type(t).__module__.startswith("torch._subclasses") for t in tree_leaves(args) if isinstance(t, Tensor))
