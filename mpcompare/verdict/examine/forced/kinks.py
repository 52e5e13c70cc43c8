"""Functions with kinks, such as a clamp or a maximum. A replay stays on the step's side of each kink.

A rounding may move a number across a kink, where the derivative jumps, or to another integer where numbers are rounded
to integers. So a replay goes on from the operands x of the step: of its own operands y it computes f(x) + J (y - x),
where J is the derivative at x, and its gradients pass through J. Between two kinks such a function is linear, or nearly
so. So this is the function of y itself, on the step's side.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from mpcompare.precision import FP16
from mpcompare.verdict.examine.forced.instead import Instead
from mpcompare.verdict.examine.unseen import Unseen

# the operators, by their names in torch's schemas
KINKED = {
    f"aten::{name}{in_place}"
    for name in (
        "relu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "threshold", "softshrink", "hardshrink",
        "_prelu_kernel", "clamp", "clamp_min", "clamp_max", "abs", "maximum", "minimum", "amax", "amin",
        "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d",
        "round", "floor", "ceil", "trunc", "frac", "sign", "remainder", "fmod", "cummax", "cummin",
    )
    for in_place in ("", "_")
}  # fmt: skip
# operators whose bounds have the format of their operand, as torch's kernels compute them on a CPU
BOUNDED = {f"aten::{name}" for name in ("clamp", "clamp_min", "clamp_max", "softshrink", "hardshrink")}
# by function of torch the operator that it calls; one that is left out calls the operator of its own name
CALLED = {
    "relu6": "hardtanh", "clip": "clamp", "max": "maximum", "min": "minimum", "absolute": "abs",
    "_threshold": "threshold", "prelu": "_prelu_kernel", "max_pool1d": "max_pool2d_with_indices",
    "max_pool2d": "max_pool2d_with_indices", "max_pool3d": "max_pool3d_with_indices",
}  # fmt: skip


def operator_of(func: Any) -> str:
    """Returns the name of the operator with kinks that a function of torch calls; empty where it calls none."""
    name = str(getattr(func, "__name__", "")).removesuffix("_")
    name = f"aten::{CALLED.get(name, name)}"
    return name if name in KINKED else ""


def operands(given: Any) -> list[Tensor]:
    """Returns the dense tensors of real numbers among the arguments of a function, in their order."""
    return [v for v in tree_leaves(given) if _is_operand(v)]


def on_their_side(func: Any, given: Any, theirs: Sequence[Tensor], near: float) -> Any:
    """Returns the result of a function with kinks, on the step's side of each kink.

    Args:
        given: its arguments, without names and with them.
        theirs: the operands of the step.
        near: the part of the largest number by which roundings move an operand at most. An element that is further off
            is the replay's own.
    """
    own = operands(given)
    if operator_of(func) in BOUNDED:
        given = tree_map_only(float, lambda bound: torch.tensor(bound, dtype=theirs[0].dtype).item(), given)
    with torch._C.DisableTorchFunction():
        with Unseen(), torch.no_grad():
            at = [_near(y, x.reshape(y.shape).to(y.dtype), near) for y, x in zip(own, theirs, strict=True)]
            # The difference of infinity and infinity is NaN.
            differences = [torch.where(y == x, 0.0, y - x) for y, x in zip(own, at, strict=True)]
            further = _along(func, given, at, differences)
        moved = [Instead.apply(y, x) for y, x in zip(own, at, strict=True)]
        result = _called(func, given, moved)
        is_in_place = any(result is x for x in moved)
        flat, spec = tree_flatten(result)
        with Unseen():
            flat = [y if d is None else y + d for y, d in zip(flat, further, strict=True)]
        return own[0].copy_(flat[0]) if is_in_place else tree_unflatten(flat, spec)


def nearest(own: Tensor, theirs: Iterable[Tensor]) -> Tensor:
    """Returns the operand of the step that is nearest to an operand of a replay; an empty one where there is none."""
    with Unseen(), torch.no_grad():
        alike = [x for x in theirs if x.numel() == own.numel()]
        return min(alike, key=lambda x: float((own - x.reshape(own.shape)).norm()), default=torch.empty(0))


def _near(own: Tensor, theirs: Tensor, near: float) -> Tensor:
    """Returns the operand of the step, but for elements that are further off than roundings. Numbers beyond fp16 stand
    for infinity in a mask, and do not count as the largest number."""
    sizes = theirs.abs()
    largest = torch.where(sizes < FP16.maximum, sizes, 0.0).max() if sizes.numel() else 0.0
    return torch.where((own - theirs).abs() <= near * largest, theirs, own)


def _along(func: Any, given: Any, at: Sequence[Tensor], further: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns J d for each result, or None where there is no J: d is how much ``further`` the operands are than ``at``,
    where J is taken."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.clone(), d) for x, d in zip(at, further, strict=True)]
        results = tree_leaves(_called(func, given, duals))
        return [forward_ad.unpack_dual(y).tangent if _is_operand(y) else None for y in results]


def _called(func: Any, given: Any, taken: Sequence[Tensor]) -> Any:
    """Calls a function with other operands."""
    left = iter(taken)
    args, kwargs = tree_map_only(Tensor, lambda t: next(left) if _is_operand(t) else t, given)
    return func(*args, **kwargs)


def _is_operand(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided
