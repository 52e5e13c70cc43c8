"""The layers of torch's own, and the formats in which all other code multiplies.

Torch's layers of products return the format in which they multiply. A layer with code of its own, such as a router, may
return any format, and so may the work between layers, such as experts. So the formats in which they multiply are noted
in the step, line by line, and a replay rounds the operands as the step did.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mpcompare.dtypes import HALF
from mpcompare.verdict.examine.forced.choices import Line
from mpcompare.verdict.examine.rounded_operands import MULTIPLY
from mpcompare.verdict.examine.unseen import Unseen
from mpcompare.verdict.examine.widened import requires_gradient

OPERATORS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")}
PRODUCTS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
Formats = Mapping[Line, set[torch.dtype]]


def is_torchs(module: nn.Module) -> bool:
    """Returns whether the code of a layer is torch's own. The code of a subclass may be another."""
    changed: set[str] = set()
    for each in type(module).__mro__:
        if each.__module__.startswith("torch.nn."):
            return each is not nn.Module and not (changed and changed & {*dir(each), "weight", "bias"})
        changed |= {name for name in vars(each) if not name.startswith("__")}
    return False


def multiplies(module: nn.Module) -> bool:
    """Returns whether the weights of a layer are operands of products as they are. The code of a subclass of a layer
    with one product may compute its weight first."""
    return isinstance(module, MULTIPLY) and (is_torchs(module) or not isinstance(module, PRODUCTS))


def format_of(args: Any) -> torch.dtype | None:
    """Returns the format of the operands of a product; None where they are no real numbers."""
    return next((a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)


def halves_within(module: nn.Module, formats: Formats, passes: Sequence[bool]) -> dict[Line, torch.dtype]:
    """Returns, by line of code, the format of 16 bits in which a module multiplies there: a layer, or the network
    between its layers. Nothing for the layers of :func:`multiplies`, and where the module passes no gradient, as a
    layer of positions. A line that multiplies in several formats, or in none of 16 bits, is left out.

    Args:
        formats: by line the formats in which the code was seen to multiply.
        passes: whether each output of the module requires a gradient.
    """
    if multiplies(module) or not any(passes):
        return {}
    return {line: kind for line, kinds in formats.items() for kind in kinds if len(kinds) == 1 and kind in HALF}


def as_operands(values: Any, half: torch.dtype) -> Any:
    """Returns a nest of the operands of a product with the real numbers in it rounded to ``half``. Their gradients are
    not rounded. A product of constants stays as it is: nobody wants positions in 16 bits."""
    if not any(isinstance(value, Tensor) and requires_gradient(value) for value in tree_leaves(values)):
        return values
    return tree_map_only(Tensor, lambda t: _Rounded.apply(t, half) if t.is_floating_point() else t, values)


class _Rounded(torch.autograd.Function):
    generate_vmap_rule = True  # the network may multiply within ``torch.vmap``

    @staticmethod
    def forward(x: Tensor, half: torch.dtype) -> Tensor:
        operand = x.clone()  # seen: within somebody's own function only a mode knows what depends on parameters
        with Unseen():
            return operand.copy_(x.to(half))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
