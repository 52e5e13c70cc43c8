"""The hooks of a network's modules as they were when the loop called it. A loop may put on a hook for its training
alone, such as a hook that adds noise to embeddings, and take it off before the watch ends."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from mpcompare.verdict.examine.forced.module_hooks import is_recorders

KINDS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
Hooks = dict[str, dict[str, dict[int, Any]]]  # by module and by kind


def hooks_of(network: nn.Module) -> Hooks:
    """Returns the hooks of all modules, without the hooks of a recorder."""
    return {
        name: {
            kind: {at: hook for at, hook in own.items() if not is_recorders(hook)} for kind, own in _of(module).items()
        }
        for name, module in network.named_modules()
        if any(_of(module).values())
    }


@contextmanager
def hooks_then(network: nn.Module, hooks: Hooks) -> Iterator[None]:
    """Gives a network these hooks, and no others, while it is entered."""
    now = [(own, dict(own)) for module in network.modules() for own in _of(module).values()]
    for name, module in network.named_modules():
        for kind, own in _of(module).items():
            _fill(own, hooks.get(name, {}).get(kind, {}))
    try:
        yield
    finally:
        for own, before in now:
            _fill(own, before)


def _fill(own: dict[int, Any], hooks: Mapping[int, Any]) -> None:
    """Gives a module these hooks. The dict is the same: a handle of a hook refers to it."""
    own.clear()
    own.update(hooks)


def _of(module: nn.Module) -> dict[str, Any]:
    """Returns the dicts of a module's hooks, by their kind; a compiled module has none."""
    return {kind: module.__dict__[kind] for kind in KINDS if kind in module.__dict__}
