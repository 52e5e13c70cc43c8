"""The rows of a batch that each call of the network was given, and the factor of the gradients at its output.

A backend may take the rows in another order, or in parts. The loss is still the loss of the whole batch, and it is
replayed with the targets of the rows. A backend may also multiply the loss by a factor that it does not tell.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from mpcompare.contract import Batches
from mpcompare.tasks.batch import Batch, Tree, tensors_of
from mpcompare.verdict.examine.forced.record import Call, is_real
from mpcompare.verdict.examine.numerics import numbers


def as_given(calls: Sequence[Call], batches: Batches, storage: torch.dtype) -> bool:
    """Returns whether the network was called once for each micro-batch, with its inputs, those rounded to ``storage``,
    or others that are still nearest to the row in their place."""
    if len(calls) != len(batches):
        return False
    own = [tensors_of(x) for x, _ in batches]
    given = [given_for(call, x) for call, (x, _) in zip(calls, batches, strict=True)]
    if [*map(len, given)] != [*map(len, own)]:
        return False
    places = [*zip(zip(*given, strict=True), zip(*own, strict=True), strict=True)]
    rounded = partial(is_rounded, storage=storage)
    return all(all(map(rounded, theirs, ours)) or _in_order(theirs, ours) for theirs, ours in places)


def has_other_whole_numbers(calls: Sequence[Call], batches: Batches) -> bool:
    """Returns whether the network was given other whole numbers than the batches have, such as other words. The order
    of rows and of tensors does not count: a backend may change both. Where the network was given more or fewer numbers,
    as without padding, or fewer tensors, as without a mask, nobody can tell."""
    given, own = (
        [torch.cat([t.flatten().long() for t in some]).sort().values for some in zip(*map(_whole, parts), strict=False)]
        for parts in ([call.inputs for call in calls], [tensors_of(x) for x, _ in batches])
    )
    if len(given) < len(own):
        return False
    alike = [[theirs for theirs in given if theirs.shape == ours.shape] for ours in own]
    return any(some and not any(map(ours.equal, some)) for ours, some in zip(own, alike, strict=True))


def rows_of(calls: Sequence[Call], batches: Batches, storage: torch.dtype) -> list[Tensor] | None:
    """Returns the numbers of the rows that each call was given, counted over all batches; None where the calls do not
    have each row once, or nobody can tell."""
    given = [given_for(call, batches[0][0]) for call in calls]
    own = [tensors_of(x) for x, _ in batches]
    if not calls or len({tuple(t.shape[1:] for t in tensors) for tensors in (*given, *own)}) > 1:
        return None
    theirs, ours = _in_rows(given), _in_rows(own)
    if len(theirs) != len(ours):
        return None
    at = torch.randn(ours.shape[1], dtype=ours.dtype, generator=torch.Generator().manual_seed(0)).to(ours.device)
    if len((ours.bfloat16().double() @ at).unique()) < len(ours):  # nobody can tell which target belongs to which row
        return None
    order = torch.empty(len(ours), dtype=torch.int64, device=ours.device)
    order[(theirs @ at).argsort()] = (ours @ at).argsort()
    if not is_rounded(theirs, ours[order], storage):
        return None
    return list(order.split([len(tensors[0]) for tensors in given]))


def factor_of(recorded: Sequence[Tensor | None], exact: Sequence[Tensor | None], known: Sequence[float]) -> float:
    """Returns the factor by which a backend multiplies its gradients at the output of the network. It is the first of
    the ``known`` ones, unless another factor at least halves the errors: a backend need not say by which factor it
    multiplies and divides again. The gradients of the parameters tell whether it divides.

    Args:
        known: the loss scale, and the factors of earlier calls. The calls of one loss have one factor, though each call
            shows it only within its own roundings.
    """
    both = zip(recorded, exact, strict=False)
    pairs = [(g, e) for g, e in both if g is not None and e is not None]
    some = [(g.detach().double().flatten(), e.detach().double().flatten()) for g, e in pairs]
    if not some:
        return known[0]
    seen, right = (torch.cat(each) for each in zip(*some, strict=True))
    square = float(right @ right)
    slope = float(seen @ right) / square if square else 0.0
    # Few different numbers may all be rounded up, or all down: such an error is no factor.
    u = max(torch.finfo(g.dtype).eps / 2 for g, _ in pairs)
    if rounded := [f for f in known if abs(slope - f) <= u * abs(f)]:
        return rounded[0]
    rest = float((seen - slope * right).norm())
    return next((f for f in known if not rest < float((seen - f * right).norm()) / 2), slope or known[0])


def given_for(call: Call, x: Batch) -> list[Tensor]:
    """Returns the tensors that a call was given for the inputs ``x``: those with their names, or else the first."""
    if isinstance(x, Tree) and isinstance(x.value, dict) and call.arguments is not None:
        named = tree_unflatten(call.inputs, call.arguments)[1]
        if x.value.keys() <= named.keys():
            return tensors_of(Tree({name: named[name] for name in x.value}))
    return [v for v in call.inputs if isinstance(v, Tensor)][: len(tensors_of(x))]


def _whole(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors of whole numbers."""
    return [v for v in values if isinstance(v, Tensor) and not (is_real(v) or v.is_complex())]


def _in_rows(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """Returns all numbers as a matrix, a row for each sample."""
    return torch.cat(
        [torch.cat([t.detach().double().reshape(len(t), -1) for t in tensors], dim=1) for tensors in parts]
    )


def _in_order(given: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
    """Returns whether each row of real numbers is as near to the row in its place as to any other of all batches."""
    shapes = {t.shape[1:] for t in (*given, *own)}
    if len(shapes) > 1 or [len(t) for t in given] != [len(t) for t in own]:
        return False
    one, other = torch.cat([*given]), torch.cat([*own])
    if one.dim() < 2 or not (one.is_floating_point() and other.is_floating_point()):
        return False
    apart = torch.cdist(_some_of_rows(one), _some_of_rows(other))
    return bool((apart.diagonal() <= apart.amin(1)).all())


def _some_of_rows(t: Tensor) -> Tensor:
    """Returns some elements of each row."""
    rows = t.detach().double().flatten(1)
    return rows[:, :: max(rows.shape[1] // 4096, 1)]


def is_rounded(one: Tensor, other: Tensor, storage: torch.dtype) -> bool:
    """Returns whether a tensor equals the ``other`` one, whose real numbers may be rounded to a format."""
    if one.shape != other.shape:
        return False
    if not (is_real(other) or other.is_complex()):
        return bool((one == other).all())
    limits = torch.finfo(storage)
    u, least = limits.eps / 2, limits.smallest_normal * limits.eps / 2
    return bool(torch.isclose(numbers(one).double(), numbers(other).double(), rtol=u, atol=least, equal_nan=True).all())
