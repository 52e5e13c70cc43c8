"""The modes of a watch among the modes that a loop enters, such as a counter of operations.

Whoever leaves a mode takes the top one off. So the watch's own modes lie below the loop's, and leave from there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Mode = TorchFunctionMode | TorchDispatchMode


def stack_of(mode: Mode) -> list[Any]:
    """Returns the modes of the kind of a mode that are entered, the top one last."""
    is_of_functions = isinstance(mode, TorchFunctionMode)
    return _get_current_function_mode_stack() if is_of_functions else _get_current_dispatch_mode_stack()


def is_on_top(mode: Mode) -> bool:
    """Returns whether a mode is the one that was entered last."""
    return stack_of(mode)[-1:] == [mode]


def enter(mode: Mode) -> None:
    """Enters a mode of the watch, below the loop's and above other looks'. A default device lies below all others."""
    below = (DeviceContext, type(mode))
    stack = stack_of(mode)
    place = next((at for at, each in enumerate(stack) if not isinstance(each, below)), len(stack))
    with _without(stack[place:]):
        mode.__enter__()


def leave(mode: Mode) -> bool:
    """Leaves a mode wherever it lies. Returns whether it was entered."""
    stack = stack_of(mode)
    if mode not in stack:
        return False
    with _without(stack[stack.index(mode) + 1 :]):
        mode.__exit__(None, None, None)
    return True


@contextmanager
def _without(modes: list[Any]) -> Iterator[None]:
    """Takes the top modes off for a while. Their own methods would begin and end what they do."""
    for each in reversed(modes):
        _kind(each).__exit__(each, None, None, None)
    try:
        yield
    finally:
        for each in modes:
            _kind(each).__enter__(each)


def _kind(mode: Mode) -> Any:
    return TorchFunctionMode if isinstance(mode, TorchFunctionMode) else TorchDispatchMode
