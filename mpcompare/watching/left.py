"""The gradients as backward left them, and what the loop has changed of them since."""

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.verdict.examine.numerics import in_part, numbers, same_bits, total_norm
from mpcompare.verdict.examine.unseen import Unseen
from mpcompare.watching.spool import Spool
from mpcompare.watching.steps import LeftGradient


class Left:
    """The gradients that the last backward left.

    Attributes:
        grads: by parameter the gradient itself, which the loop may change.
        kept: by parameter the gradient before anything changed it.
        changed: the parameters whose gradients the loop had changed before the last backward, as by a clip.
        places: the places of their numbers in memory.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], spool: Spool, hide: Callable[[str], None]) -> None:
        """``hide`` is told why the layers cannot be replayed."""
        self.params, self.spool, self.hide = params, spool, hide
        self.grads: dict[str, Tensor] = {}
        self.kept: dict[str, LeftGradient] = {}
        self.changed: set[str] = set()
        self.places: set[int] = set()
        self._versions: dict[str, int] = {}  # how often each gradient had been written to
        self._before: dict[str, tuple[int, int]] = {}  # by parameter the gradient before backward: see _written

    def begins(self, owned: Set[str]) -> None:
        """Is told that a backward begins, which may write to the gradients of some parameters."""
        self._before = {name: _written(self.params[name]) for name in owned}

    def given(self) -> set[str]:
        """Returns the parameters whose gradients the last backward has written to."""
        return {name for name, before in self._before.items() if _written(self.params[name]) != before}

    def note(self, owned: Set[str], gives: Set[str]) -> None:
        """Notes the gradients that backward has left. It has written to the gradients ``gives``."""
        grads = {name: self.params[name].grad for name in owned}
        self.grads = {name: g for name, g in grads.items() if g is not None}
        self._versions = {name: g._version for name, g in self.grads.items()}
        self.places = {_place(g) for g in self.grads.values()} - {0}
        self.kept = {name: self.kept[name] for name in self.changed - gives}
        self.changed = set()

    def keep(self) -> None:
        """Keeps the gradients; called before anything changes them."""
        left = {name: g for name, g in self.grads.items() if name not in self.kept}
        if any(g._version != self._versions[name] for name, g in left.items()):
            self.hide("something changes the gradients that nobody sees, such as a compiled function")
        with torch.no_grad(), Unseen():
            self.kept |= {name: self._copy(name, g) for name, g in left.items()}

    def _copy(self, name: str, grad: Tensor) -> LeftGradient:
        dense = numbers(grad)
        return LeftGradient(self.spool.copy(in_part(dense)), self.spool.some(dense), total_norm({name: dense}, 2.0))

    def is_changed(self, name: str) -> bool:
        """Returns whether a gradient has other bits than backward left."""
        kept = self.kept.get(name)
        return kept is not None and not same_bits(in_part(numbers(self.grads[name])), kept.part)

    def is_untouched(self, name: str) -> bool:
        """Returns whether nothing has written to a gradient, which is 0 now, since backward left it. Functions of torch
        on many tensors do not count that they write."""
        grad, kept = self.params[name].grad, self.kept.get(name)
        same = grad is not None and grad is self.grads.get(name) and grad._version == self._versions[name]
        return same and (kept is None or kept.norm == 0)

    def were_0(self, names: Set[str]) -> bool:
        """Returns whether backward left gradients of 0 alone, so that nobody may have cleared them."""
        return all(name in self.kept and self.kept[name].norm == 0 for name in names)

    def is_held(self) -> bool:
        """Returns whether the loop keeps all gradients that it has cleared: then we are not the last to refer to them.
        A variable that is left over refers to one of several."""
        cleared = {name: g for name, g in self.grads.items() if self.params[name].grad is not g}
        own = {"": torch.empty(0)}  # two dictionaries refer to it, as to a gradient that the loop has let go
        (ours,) = _references(dict(own))
        return bool(cleared) and min(_references(cleared)) > ours

    def has_any(self, values: Sequence[Any], others: Sequence[Tensor]) -> bool:
        """Returns whether some of these values are gradients that backward left, or ``others``."""
        places = self.places.union(map(_place, others)) - {0} if others else self.places
        return any(isinstance(t, Tensor) and _place(t) in places for t in values)

    def forget(self) -> None:
        """Frees all gradients."""
        self.grads, self.places, self.kept = {}, set(), {}


def is_there(grad: Tensor | None) -> bool:
    """Returns whether a gradient has any number but 0."""
    return grad is not None and bool(numbers(grad).any())


def _references(tensors: Mapping[str, Tensor]) -> list[int]:
    """Returns how many objects refer to each tensor, among them some of our own."""
    return [sys.getrefcount(t) for t in tensors.values()]


def _written(p: Tensor) -> tuple[int, int]:
    """Returns the ``id`` of a parameter's gradient, and how often it was written to."""
    return id(p.grad), -1 if p.grad is None else p.grad._version


def _place(tensor: Tensor) -> int:
    """Returns where the numbers of a tensor are in memory; 0 where there are none, and for a nested tensor, which is no
    gradient of a parameter."""
    kept = tensor._values() if tensor.is_sparse else tensor
    return kept.data_ptr() if kept.layout is torch.strided and not kept.is_nested else 0
