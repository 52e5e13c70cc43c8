"""The masks that fused attentions draw within their kernels, drawn once more.

No operator returns such a mask, and a replay computes an attention from its parts, which need it. The mask depends on
the state of the generator, on the shapes and on the kernel, and on no operand. So the same kernel is called again from
the same state, with weights that are all alike and with values that are 1 in one row. Its result shows the weights that
it dropped. One head of the step is then computed with the mask. If the step had another result, nobody knows how the
kernel draws.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpcompare.generators import DeviceGenerator
from mpcompare.verdict.examine.unseen import Unseen

OPERANDS = ("query", "key", "value", "attn_bias")
CLOSE = 2.0**-5  # of the norm of a head: 16 bits move the head by less, and another mask of p = 0.001 by more

BEYOND = 64  # numbers after the last one: a kernel may read several at once


class Like(NamedTuple):
    """An operand without its numbers. It has all that a kernel may choose its work by."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def alike(self, writable: bool = False) -> Tensor:
        """Returns an operand of equal numbers. A mask that says which weights count lets all weights count. A
        ``writable`` operand has no number in two places."""
        number = 1 if self.dtype is torch.bool else 0
        if writable and any(not s and n > 1 for s, n in zip(self.stride, self.shape, strict=True)):
            return torch.full(self.shape, number, dtype=self.dtype, device=self.device)
        span = sum(s * (n - 1) for s, n in zip(self.stride, self.shape, strict=True)) + BEYOND
        return torch.full((span,), number, dtype=self.dtype, device=self.device).as_strided(self.shape, self.stride)


def bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of an operator by their names. Arguments with their default values may be left out."""
    names = [each.name for each in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | (kwargs or {})


@dataclass(frozen=True)
class FusedAttention:
    """A call of a fused attention that drops weights."""

    func: Any
    arguments: dict[str, Any]  # by name; a :class:`Like` in the place of each tensor
    state: Tensor  # the state of the generator before the call
    head: dict[str, Tensor]  # the operands and the result of its last head, in the last row of the batch

    @property
    def shape(self) -> torch.Size:
        """The shape of its weights."""
        query, key = self.arguments["query"], self.arguments["key"]
        return torch.Size([*query.shape[:-1], key.shape[-2]])

    @cached_property
    def mask(self) -> Tensor | None:
        """Tells which weights it kept, bool; None where the kernel draws in a way that we do not know. The generator is
        left in another state."""
        with torch.no_grad(), Unseen():
            mask = self.drawn_again()
            return mask if self.error_with(mask) <= CLOSE else None

    def drawn_again(self) -> Tensor:
        """Returns the mask that the kernel draws from the same state, as :attr:`mask` has it, right or wrong."""
        given = {n: each.alike(n == "value") if isinstance(each, Like) else each for n, each in self.arguments.items()}
        value, columns = given["value"], self.shape[-1]
        generator, kept = DeviceGenerator(value.device), []
        for start in range(0, columns, value.shape[-1]):
            some = torch.arange(min(value.shape[-1], columns - start), device=value.device)
            value.zero_()[..., start + some, some] = 1
            generator.set(self.state)
            kept.append(self.func(**given)[0][..., : len(some)] > 0.25 / columns)
        return torch.cat(kept, dim=-1)

    def error_with(self, mask: Tensor) -> float:
        """Returns the distance of the attention with a mask from the step's result, in one head, as a share of the
        result's norm."""
        head = {name: t.to(mask.device).double() for name, t in self.head.items() if t.dtype is not torch.bool}
        scale = self.arguments.get("scale") or 1 / math.sqrt(head["query"].shape[-1])
        weights = head["query"] @ head["key"].T * scale + head.get("attn_bias", 0.0)
        if self.arguments.get("is_causal"):
            weights = weights.masked_fill(torch.ones_like(weights).tril() == 0, -math.inf)
        if "attn_bias" in self.head and "attn_bias" not in head:
            weights = weights.masked_fill(~self.head["attn_bias"].to(mask.device), -math.inf)
        kept = _last(mask).double() / (1 - self.arguments["dropout_p"])
        made, result = (each.nan_to_num(0.0) for each in (weights.softmax(-1) * kept @ head["value"], head["result"]))
        return float((made - result).norm() / result.norm())


def fused_attention(
    func: Any, args: Any, kwargs: Any, result: Tensor, state: Tensor, copy: Callable[[Tensor], Tensor]
) -> FusedAttention | None:
    """Returns a call of a fused attention that dropped weights; None for any other operator.

    Args:
        state: the state of the generator before the call.
        copy: makes the copies of one head.
    """
    given = bound(func, args, kwargs)
    if "scaled_dot_product" not in func.name() or not given.get("dropout_p"):
        return None
    tensors = {name: given[name] for name in OPERANDS if isinstance(given.get(name), Tensor)}
    like = {n: Like(t.shape, t.stride(), t.dtype, t.device) for n, t in given.items() if isinstance(t, Tensor)}
    head = {name: copy(_last(t)) for name, t in (tensors | {"result": result}).items()}
    return FusedAttention(func, given | like, state, head)


def _last(tensor: Tensor) -> Tensor:
    """Returns the last matrix of a batch of matrices."""
    matrix: Tensor = tensor[(-1,) * (tensor.dim() - 2)]
    return matrix
