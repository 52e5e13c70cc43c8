"""Operators that torch has in 16 bits and not in float64, as functions that compute in any dtype."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the products of the experts of a mixture, as ``torch.nn.functional.grouped_mm`` does.

    Args:
        a: [rows, K], of which each expert has some; or [experts, rows, K].
        b: [experts, K, N]; or [K, N], of which each has some columns; of two matrices both have parts of K.
        offs: the end of each expert's part [experts]; None where there are no parts.
        bias: is added to each product.
        out_dtype: of the result; None: that of the operands.
    """
    if offs is None:
        found = a @ b
    else:
        ends = offs.tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]

        def parts(t: Tensor, dim: int) -> Any:
            return t.narrow(dim, 0, ends[-1]).split(sizes, dim) if t.dim() == 2 else t

        if a.dim() == b.dim() == 2:
            found = torch.stack([x @ y for x, y in zip(parts(a, 1), parts(b, 0), strict=True)])
        else:
            dim = 0 if a.dim() == 2 else 1
            found = torch.cat([x @ y for x, y in zip(parts(a, 0), parts(b, 1), strict=True)], dim)
            nobody = (a.shape[0] if dim == 0 else b.shape[1]) - ends[-1]
            found = torch.nn.functional.pad(found, (0, 0, 0, nobody) if dim == 0 else (0, nobody))
    found = found if bias is None else found + bias
    return found if out_dtype is None else found.to(out_dtype)


IN_FULL: dict[Any, Callable[..., Any]] = {torch._grouped_mm: grouped_product}
