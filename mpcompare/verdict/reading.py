"""How the numbers of ``numerics.json`` are read. Without torch, which who draws a report need not load."""

import math
from collections.abc import Mapping
from typing import Any

LOWEST, HIGHEST = -60, 20  # exponents that are told apart: fp16 ends at -24 and 15


def factor_of_norm(norm: float, clip_norm: float) -> float:
    """What clipping multiplies gradients of this norm by, the rule of ``torch.nn.utils.clip_grad_norm_``."""
    return min(1.0, clip_norm / (norm + 1e-6))


def relative_error(e: Mapping[str, Any]) -> float:
    """``||g - exact|| / ||exact||`` from :func:`~mpcompare.verdict.examine.numerics.gradient_errors`; inf where g is
    missing or holds no number."""
    if not e or (not e["norm"] and e["error"]):
        return math.inf
    relative = e["error"] / e["norm"] if e["norm"] else 0.0
    return relative if math.isfinite(relative) else math.inf
