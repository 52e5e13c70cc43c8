"""The user's own functions, ``torch.autograd.Function``, while somebody listens to their calls.

Torch tells nobody of these calls, and many functions have another name (``relu = MyReLU.apply``). So the forward method
of each class is replaced while somebody listens.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction, Function

Ended = Callable[[Any, Any], None]  # is given the node of autograd's graph, which is the context, and the result
Listener = Callable[[type[Function], tuple[Any, ...]], Ended | None]
_listeners: list[Listener] = []
_replaced = ExitStack()  # holds the replaced methods; it puts back what each class had
_begun: list[list[Ended]] = []  # for functions whose context is set up by another method
_inside = [0]


@contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Tells a listener of each call of a user's own function while it is entered. The listener gets the function and
    its arguments before the call. If it returns a function, this function gets node and result after the call."""
    if not _listeners:
        for kind in _own(Function):
            _replace(kind)
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            _replaced.close()


def is_called() -> bool:
    """Returns whether one of these functions is being called: what its forward method calls is a part of it."""
    return _inside[0] > 0


@contextmanager
def called() -> Iterator[None]:
    """While it is entered, a forward method is being called. Nobody is told of functions that this method calls."""
    _inside[0] += 1
    try:
        yield
    finally:
        _inside[0] -= 1


def has_context(kind: type[Function]) -> bool:
    """Returns whether forward is given the context, and no other method is."""
    return kind.setup_context is Function.setup_context


def forward_of(kind: type[Function]) -> Callable[..., Any]:
    """Returns the forward method of a function. A call of this method is told to nobody."""
    found: Callable[..., Any] = getattr(kind.forward, "plain", kind.forward)
    return found


def _own(kind: type[Function]) -> Iterator[type[Function]]:
    """Yields the functions that are neither torch's nor ours."""
    for each in kind.__subclasses__():
        if each.__module__.partition(".")[0] not in ("torch", "mpcompare"):
            yield each
        yield from _own(each)


def _replace(kind: type[Function]) -> None:
    forward, with_context = forward_of(kind), has_context(kind)
    set_up = getattr(kind.setup_context, "plain", kind.setup_context)

    def call(*given: Any) -> Any:
        if torch.compiler.is_compiling() or is_called():
            return forward(*given)
        args = given[1:] if with_context else given
        ends = [listener(kind, args) for listener in _listeners]
        with called():
            result = forward(*given)
        _begun.append([end for end in ends if end is not None])
        if with_context:
            _end(given[0], result)
        return result

    def call_set_up(context: Any, inputs: Any, output: Any) -> None:
        set_up(context, inputs, output)
        if not torch.compiler.is_compiling() and not is_called():
            _end(context, output)

    methods = {"forward": (call, forward)} | ({} if with_context else {"setup_context": (call_set_up, set_up)})
    for name, (method, plain) in methods.items():
        vars(method)["plain"] = plain  # a subclass may have the method of another class
        _replaced.enter_context(mock.patch.object(kind, name, staticmethod(method)))


def _end(node: Any, result: Any) -> None:
    for end in _begun.pop():
        if isinstance(node, BackwardCFunction):  # a forward method may be called by itself
            end(node, result)
