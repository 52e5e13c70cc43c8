"""The tensors in objects that torch's pytree does not open, such as an instance of a dataclass or a distribution."""

from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

LEVELS = 3  # an object may hold others: a distribution of independent rows holds the distribution of each number
CLOSED = (Tensor, nn.Module, type, ModuleType, FunctionType, bool, int, float, str, type(None))


def tensors_in(value: Any, levels: int = LEVELS) -> list[Tensor]:
    """Returns the tensors in the attributes of an object, or in its items if it is a dict, in the order of their names.
    A tensor that is there twice is returned once. A tensor itself, and a module, hold none."""
    if isinstance(value, CLOSED) or not levels:
        return []
    own = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        own |= {name: getattr(value, name, None) for name in tree_leaves(vars(kind).get("__slots__", ()))}
    own |= value if isinstance(value, dict) else {}
    leaves = tree_leaves([each for _, each in sorted(own.items(), key=lambda item: str(item[0]))])
    found = [t for leaf in leaves for t in ([leaf] if isinstance(leaf, Tensor) else tensors_in(leaf, levels - 1))]
    return list({id(t): t for t in found}.values())


def leaves_of(nest: Any) -> list[Any]:
    """Returns the leaves of a nest, and then the tensors in those leaves that are objects."""
    leaves = tree_leaves(nest)
    return leaves + [t for leaf in leaves for t in tensors_in(leaf)]
