"""The constants of a network that a step has in 16 bits, such as the degrees of a graph, or the sines of positions.

A network may make such constants in the dtype of its input, and then autocast and a module in 16 bits have them in
different formats. Their last value is rounded once, where it meets a number that depends on parameters. What they are
computed from is not rounded: with rounded positions a network would compute another function.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mpcompare.dtypes import HALF
from mpcompare.verdict.examine.forced.choices import Line
from mpcompare.verdict.examine.widened import values_of

Narrow = dict[Line, torch.dtype]  # by line of code the format of 16 bits of the constants that are used there


def format_of_constants(args: Any, kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Returns the format of 16 bits of a constant among the arguments of an operator of a step; None where there is no
    such constant, and where no argument requires a gradient."""
    if not torch.is_grad_enabled():
        return None
    given = [v for v in values_of(args, kwargs) if isinstance(v, Tensor)]
    kinds = [t.dtype for t in given if t.dtype in HALF and not t.requires_grad]
    return kinds[0] if kinds and len(given) > 1 and any(t.requires_grad for t in given) else None


def are_met(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a function of a replay is given a constant and a number that requires a gradient."""
    given = [v for v in values_of(args, kwargs) if isinstance(v, Tensor)]
    return any(t.requires_grad for t in given) and any(map(is_constant, given))


def is_constant(value: Tensor) -> bool:
    """Returns whether a tensor is of real numbers that require no gradient."""
    return value.is_floating_point() and not value.requires_grad


def with_constants(values: Any, kind: torch.dtype, cast: Callable[[Tensor, torch.dtype], Tensor]) -> Any:
    """Returns a nest of arguments in which ``cast`` has taken the place of each constant: it is given the constant and
    its format of 16 bits."""
    return tree_map_only(Tensor, lambda t: cast(t, kind) if is_constant(t) else t, values)
