"""Python objects as nodes of the configuration, in which everything has a name."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from mpcompare.errors import InputError
from mpcompare.foreign import spec_of

Node = dict[str, Any]


class Objects:
    """The objects of one call. An object that a new process can import keeps its own name. Any other is carried there,
    and has a name in ``mpcompare.caller``."""

    def __init__(self) -> None:
        self.carried: dict[str, Any] = {}  # by name

    def name(self, thing: Any, role: str) -> str:
        """Returns the dotted name under which a process of the race finds ``thing``. ``role`` names what has none."""
        if importable(thing):
            return f"{thing.__module__}.{thing.__qualname__}"
        own = getattr(thing, "__name__", type(thing).__name__)
        wanted = own if own.isidentifier() and not own.startswith("__") else role
        name, number = wanted, 1
        while self.carried.setdefault(name, thing) is not thing:
            number += 1
            name = f"{wanted}_{number}"
        return f"mpcompare.caller.{name}"

    def call(self, maker: Any, role: str) -> Node:
        """Returns the node of a call of ``maker``. The arguments of a ``functools.partial`` are shown if they are plain
        values."""
        if isinstance(maker, partial):
            if plain([*maker.args, *maker.keywords.values()]):
                arguments = {"_args_": list(maker.args)} if maker.args else {}
                return {**self.call(maker.func, role), **arguments, **maker.keywords}
            maker = _named_like(maker, maker.func)
        return {"_target_": self.name(maker, role)}

    def function(self, given: Any, role: str) -> Node:
        """Returns the node of a callable that is not called yet."""
        if inspect.isroutine(given) or isinstance(given, partial):
            return {**self.call(given, role), "_partial_": True}
        return {"_target_": "hydra.utils.get_object", "path": self.name(given, role)}

    @contextmanager
    def by_value(self) -> Iterator[None]:
        """Lets cloudpickle save the code of modules that a new process cannot import, such as a test's."""
        import cloudpickle

        modules = {getattr(each, "__module__", None) for each in self.carried.values()} - {"__main__", None}
        with ExitStack() as stack:
            for module in (sys.modules[name] for name in modules if name in sys.modules and not on_path(name)):
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
            yield


def importable(thing: Any) -> bool:
    """Returns whether a new process finds ``thing`` under its own name."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "<")
    if module in (None, "__main__") or "<" in name or not on_path(module):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is thing


def on_path(module: str) -> bool:
    """Returns whether a new process that has this one's ``sys.path`` finds the module where this one found it."""
    if module in sys.builtin_module_names:
        return True
    found = spec_of(module)
    return found is not None and found.origin == getattr(sys.modules.get(module), "__file__", None)


def plain(value: Any) -> bool:
    """Returns whether a configuration can hold the value: a number, a text, a bool, None, or a list of these."""
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    return value is None or type(of_python(value)) in (bool, int, float, str)


def of_python(value: Any) -> Any:
    """Returns a number of numpy, and each such number of a table, as Python's."""
    import numpy as np  # is slow to import

    if isinstance(value, Mapping):
        return {key: of_python(each) for key, each in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def written(key: str, value: Any) -> str:
    """Returns a value in the grammar of Hydra's overrides. Raises InputError for a value of another kind."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {written(key, item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(written(key, item) for item in value) + "]"
    if not plain(value):
        kind = type(value).__name__
        raise InputError(key, f"{kind} {value}", "expected a number, a text, a bool, None, or a list of these")
    if isinstance(value, str):
        from hydra.core.override_parser.types import Quote, QuotedString  # Hydra is slow to import

        return QuotedString(value, Quote.single).with_quotes()
    value = of_python(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _named_like(maker: Any, named: Any) -> Any:
    def call(*args: Any, **values: Any) -> Any:
        return maker(*args, **values)

    call.__name__ = getattr(named, "__name__", "call")
    return call
