"""The hooks that are put on modules to look at their calls, and what stands in their place in a copy of a module."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Hook:
    """A hook of one module. It does nothing in a copy of the module, such as an average of weights, in a file, or while
    somebody compiles a function that calls the module. It also does nothing if somebody has put another forward in the
    place of the module's since. The other forward calls some of the modules within, or none."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self.module, self.call, self.forward = module, call, vars(module).get("forward")

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        is_own = module is self.module and vars(module).get("forward") is self.forward
        return self.call(module, *given) if is_own and not torch.compiler.is_compiling() else None

    def __reduce__(self) -> Any:
        return _of_copy, ()


def takes_hooks(module: nn.Module) -> bool:
    """Returns whether hooks can be put on a module, and on the modules within. Torch's scripts take none."""
    return not isinstance(module, torch.jit.ScriptModule)


def is_recorders(hook: object) -> bool:
    """Returns whether a hook is a recorder's, or what stands in its place in a copy of a module."""
    return isinstance(hook, Hook) or hook is _nothing


def _of_copy() -> Callable[..., None]:
    return _nothing


def _nothing(module: nn.Module, *given: Any) -> None:
    """Takes itself off a copy, and off the modules within: torch computes in another way where hooks are on."""
    if torch.compiler.is_compiling():
        return
    for each in module.modules():
        for hooks in (each._forward_pre_hooks, each._forward_hooks):
            for number in [number for number, hook in hooks.items() if hook is _nothing]:
                del hooks[number]


HooksOn = dict[tuple[str, nn.Module], list[RemovableHandle]]  # the hooks that are on a module, by name and module


def put_on(
    on: HooksOn, modules: Sequence[tuple[str, nn.Module]], hooks: Callable[[str, nn.Module], list[RemovableHandle]]
) -> None:
    """Puts hooks on the modules that have none ``on``, and removes the hooks of all other modules.

    Args:
        on: the hooks that are on now; it is changed.
        modules: pairs of name and module.
        hooks: puts the hooks on one module, and returns their handles.
    """
    for each in on.keys() - set(modules):
        for handle in on.pop(each):
            handle.remove()
    for each in modules:
        if each not in on:
            on[each] = hooks(*each)
