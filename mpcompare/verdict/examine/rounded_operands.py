"""The operands that every implementation of a precision multiplies: weights and inputs, rounded to its formats."""

from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.dtypes import as_complex, rounded_to
from mpcompare.precision import Precision
from mpcompare.tasks.batch import each
from mpcompare.tasks.copies import copy_of
from mpcompare.verdict.examine.widened import widened

# Layers whose weights are operands of a product: an implementation of a precision rounds them first.
MULTIPLY = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def rounded_batch(x: Any, y: Any, precision: Precision, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns inputs as the precision has them, and targets, both in ``dtype`` where they are no whole numbers."""
    if x.is_floating_point():
        x = each(lambda t: rounded_to(t, precision.activation) if t.is_floating_point() else t, x).to(dtype)
    return x, y.to(dtype) if y.is_floating_point() else y


def rounded(model: nn.Module, precision: Precision, dtype: torch.dtype) -> nn.Module:
    """Returns a copy of ``model`` in ``dtype``, whose multiplied weights are rounded to the precision. Complex buffers
    keep both of their parts, which ``model.to(dtype)`` drops."""
    operands = {id(p) for m in model.modules() if isinstance(m, MULTIPLY) for p in m.parameters(recurse=False)}

    def cast(t: Tensor, copy: bool = False) -> Tensor:
        is_cast = t.is_floating_point() or t.is_complex()
        return t.to(as_complex(dtype, t) if is_cast else t.dtype, copy=copy)

    def made(p: Tensor) -> Tensor:
        return cast(rounded_to(p, precision.weight) if id(p) in operands else p, copy=True)

    with torch.no_grad():  # each parameter is cast as it is copied: nobody needs a copy in fp32 first
        params = {id(p): type(p)(made(p), p.requires_grad) for p in model.parameters()}
    model = copy_of(model, params)
    model._apply(cast)
    return widened(model)
