"""The constants of a network that a step has in 16 bits, such as the degrees of a graph, or the sines of positions.

A network may make such constants in the dtype of its input, and then autocast and a module in 16 bits have them in
different formats. Their last value is rounded where it meets a number that depends on parameters. The numbers that it
is computed from are not rounded: with rounded positions a network would compute another function. But a product has the
relative errors of all its factors. So it is rounded as coarsely as the variance of all these roundings says.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from mpcompare.dtypes import HALF
from mpcompare.tasks.functions import writes_into_first
from mpcompare.verdict.examine.forced.choices import Line, line_of_the_network
from mpcompare.verdict.examine.forced.roundings import SELECTING
from mpcompare.verdict.examine.widened import requires_gradient, values_of

# By operator the roundings that it adds to the roundings of its factors. Torch's kernels for a power of -1/2 round a
# root, and then its reciprocal.
MULTIPLYING = {"mul": 1, "div": 1, "sqrt": 1, "reciprocal": 1, "rsqrt": 2, "pow": 2}


class Narrow(NamedTuple):
    """The constants of 16 bits that are used at a line of code."""

    kind: torch.dtype  # their format
    roundings: int  # as many independent roundings have the variance of their relative error, at most


class Constants:
    """Notes the constants of 16 bits in a step.

    Attributes:
        at: by line of code the constants that meet a number that depends on parameters there.
    """

    def __init__(self, at: dict[Line, Narrow]) -> None:
        self.at = at
        self._roundings = WeakIdKeyDictionary()  # by constant; what nobody saw being made is exact, such as a degree

    def note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Is told of an operator of the step, and of its result."""
        if not torch.is_grad_enabled():
            return
        given = [v for v in values_of(args, kwargs) if isinstance(v, Tensor)]
        if not any(t.requires_grad for t in given):
            if given and isinstance(result, Tensor) and result.dtype in HALF:
                self._roundings[result] = self._made_of(given, func)
        elif len(given) > 1 and (narrow := [t for t in given if t.dtype in HALF and not t.requires_grad]):
            line, counts = line_of_the_network(), [self._roundings.get(t, 1) for t in narrow]
            before = self.at.get(line, Narrow(narrow[0].dtype, 1)).roundings
            self.at[line] = Narrow(narrow[0].dtype, max(before, *counts))

    def _made_of(self, given: list[Tensor], func: Any) -> int:
        """Returns the roundings in the result of an operator that is given constants. A factor that comes twice has
        twice the error, and so four times the variance. An operator that neither multiplies nor selects, such as a
        sine, is rounded once, whatever it is given."""
        name, counts = func._schema.name.partition("::")[2], [self._roundings.get(t, 0) for t in given]
        if (added := MULTIPLYING.get(name.rstrip("_"))) is not None:
            times = Counter(map(id, given))
            return added + sum(times[id(t)] * count for t, count in zip(given, counts, strict=True))
        return max(counts) if (func.is_view or name in SELECTING) and given[0].dtype in HALF else 1


def are_met(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a function of a replay is given a constant and a number that requires a gradient."""
    given = [v for v in values_of(args, kwargs) if isinstance(v, Tensor)]
    return any(map(requires_gradient, given)) and any(map(is_constant, given))


def is_constant(value: Tensor) -> bool:
    """Returns whether a tensor is of real numbers that require no gradient."""
    return value.is_floating_point() and not requires_gradient(value)


def with_constants(func: Any, values: tuple[Any, Any], narrow: Narrow, cast: Callable[..., Tensor]) -> Any:
    """Returns the arguments of a function in which ``cast`` has taken the place of each constant: it is given the
    constant, its format of 16 bits, and its roundings. A constant that the function writes into is cast in place."""
    written = values[0][0] if writes_into_first(func) else None

    def changed(t: Tensor) -> Tensor:
        if not is_constant(t):
            return t
        made = cast(t, *narrow)
        return t.copy_(made) if t is written else made

    return tree_map_only(Tensor, changed, values)
