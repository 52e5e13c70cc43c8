"""Backward methods of the user's own functions, compared with the derivative of their forward methods.

A function of torch is called again in float64, and so is its derivative. The backward method of somebody's own function
is only what its author took for the derivative. Torch can differentiate the operations of the forward method, too.
Where the two differ, a finite difference of the forward method decides which of them is right.

Some functions are meant to pass another gradient than their derivative. So a backward method is believed where the
derivative is 0 (straight through a rounding), where it passes no gradient down, and where the function returns what it
is given (a reversed gradient).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

from mpcompare import generators
from mpcompare.verdict.examine.forced.record import is_real
from mpcompare.verdict.examine.forced.replay import Replay
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.verdict.examine.unseen import Unseen
from mpcompare.watching.own_functions import Ended, called, forward_of, has_context, told

STEP = 1e-4  # of a finite difference, relative to the size of the arguments: it makes an error of about 1e-8 in float64
SAME = 2.0**-12  # derivatives are equal if their relative distance is no larger: half a unit of the last digit of fp16
AGREES = 0.1  # a finite difference agrees with one of two derivatives within this share of the derivatives' distance


class Derivatives:
    """The user's own functions, as far as replays have compared them."""

    def __init__(self) -> None:
        # By name the distance of a backward method from the derivative of its forward method, as a share of this.
        self.off: dict[str, float] = {}
        self.believed: set[str] = set()  # the names of the functions that are believed
        self._wrong: set[type[Function]] = set()

    @contextmanager
    def taken(self, replay: Replay, finds_out: bool) -> Iterator[None]:
        """While it is entered, wrong backward methods are replaced by the derivatives of their forward methods.

        Args:
            replay: the replay under way. A function that calls a layer of it is believed: no layer may be called twice.
            finds_out: whether it is found out, in float64, which backward methods are wrong.
        """

        def calls() -> int:
            return sum(map(len, replay.arrived.values()))

        def begins(kind: type[Function], args: tuple[Any, ...]) -> Ended:
            forward = _Forward(kind, args, replay) if finds_out or kind in self._wrong else None
            # A name of ``apply`` may be older than this: such a function has parameters as they are.
            is_wide = not any(id(a) in replay.weights.names for a in args)
            return partial(ends, kind, forward, args, calls(), is_wide)

        def ends(
            kind: type[Function], forward: _Forward | None, args: Any, before: int, is_wide: bool, node: Any, _: Any
        ) -> None:
            node.register_hook(partial(_put_back, [(a, a.detach().clone()) for a in args if is_real(a)]))
            node.register_prehook(lambda _: setattr(replay.weights, "own_backward", is_wide))
            node.register_hook(lambda *_: setattr(replay.weights, "own_backward", False))
            if calls() != before:
                self.believed.add(kind.__name__)
            elif forward is not None:
                node.register_hook(partial(self._derived, forward, finds_out))

        def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:  # torch's modes do not see what it is given
            return plain.__get__(None, kind)(*map(replay.weights.taken, args), **kwargs)

        plain = vars(Function)["apply"]
        with told(begins), mock.patch.object(Function, "apply", classmethod(apply)):
            yield

    def _derived(
        self, forward: "_Forward", finds_out: bool, own: Sequence[Tensor | None], arrived: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...] | None:
        """Returns the gradients that the function should pass down, given its ``own`` ones and the gradients that
        arrived at its results; None where its own gradients are believed."""
        derived, name = forward.derivative(arrived), forward.kind.__name__
        if derived is None or len(derived) != len(own):
            self.believed.add(name)
            return None
        pairs = list(zip(own, derived, strict=True))
        if any(g is not None and d is not None and g.any() and not d.any() for g, d in pairs):
            self.believed.add(name)  # such as a rounding to a grid whose step is learned
            return None
        right = [g if g is None or d is None else torch.where(d != 0, d, g).to(g.dtype) for g, d in pairs]
        if finds_out:
            with Unseen() as unseen:
                apart = [None if r is None or g is None else r - g for r, g in zip(right, own, strict=True)]
                distance, size = _norm(apart), _norm(right)
                if distance > SAME * size:
                    # A finite difference along the difference of the two says which of them is right.
                    with unseen.lifted():
                        slope = forward.slope(arrived, apart)
                    if not abs(slope - _dot(right, apart)) <= AGREES * _dot(apart, apart):
                        self.believed.add(name)
                        return None
                    self._wrong.add(forward.kind)
                self.off[name] = max(self.off.get(name, 0.0), distance / size if size else 0.0)
                if any(_is_meant(g, d) for g, d in pairs):
                    self.believed.add(name)
        return tuple(right)

    def said(self) -> dict[str, Any]:
        """Returns by name how far each function is off, in two digits, or that it is believed."""
        off = {name: round(far, 2) for name, far in self.off.items()}
        return off | {name: "believed" for name in self.believed if not off.get(name)}


class _Forward:
    """A call of the forward method, outside its function. It is made before the function is called, with copies of the
    arguments: forward may write into what it is given."""

    def __init__(self, kind: type[Function], args: Any, replay: Replay) -> None:
        self.kind, self.device, self.widened = kind, replay.device, replay.weights
        self.drawn = generators.states(replay.device)
        self.args = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
        self.trained = [isinstance(a, Tensor) and a.requires_grad for a in args]

    def derivative(self, arrived: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Returns the derivative by each tensor among the arguments; None if the function has none, or returns what it
        is given."""
        leaves = [a.clone().requires_grad_() for a, t in self._given() if t]
        try:
            with torch.enable_grad():
                ways = iter(leaves)
                args = [next(ways) if t else a for a, t in self._given()]
                results = self([a.clone() if isinstance(a, Tensor) else a for a in args])
            given = [a for a in self.args if is_real(a)]
            if any(is_real(r) and same_bits(r, a) for r in results for a in given if r.shape == a.shape):
                return None
            ends = [(r, g) for r, g in zip(results, arrived, strict=True) if g is not None and r.requires_grad]
            found = iter(torch.autograd.grad([r for r, _ in ends], leaves, [g for _, g in ends], allow_unused=True))
        except Exception:  # whatever somebody's own code does outside its function: its backward method is believed
            return None
        return [next(found) if t else None for a, t in self._given() if isinstance(a, Tensor)]

    def slope(self, arrived: Sequence[Tensor | None], along: Sequence[Tensor | None]) -> float:
        """Returns a finite difference of the function, weighted by the gradients that arrived, along a direction."""
        size = _norm([a for a, t in self._given() if t])
        step = STEP * (size or 1.0) / _norm(along)
        sides = []
        for sign in (step, -step):
            ways = iter(along)
            args = [_moved(a, next(ways), sign) if isinstance(a, Tensor) else a for a in self.args]
            with torch.enable_grad():  # without gradients the user's casts would not be widened within backward
                results = self(args)
            sides.append(_dot([r.detach() if is_real(r) else None for r in results], arrived))
        return (sides[0] - sides[1]) / (2 * step)

    def _given(self) -> Iterator[tuple[Any, bool]]:
        return zip(self.args, self.trained, strict=True)

    def __call__(self, args: Sequence[Any]) -> Sequence[Any]:
        context: Any = FunctionCtx()
        context.needs_input_grad = tuple(self.trained)
        given = (context,) if has_context(self.kind) else ()
        with generators.kept(self.device):
            generators.put_back(self.drawn, self.device)
            with called(), self.widened:  # autograd calls hooks outside of all modes
                result = forward_of(self.kind)(*given, *args)
        return result if isinstance(result, tuple) else (result,)


def _put_back(
    given: Sequence[tuple[Tensor, Tensor]], own: Sequence[Tensor | None], _: Any
) -> tuple[Tensor | None, ...] | None:
    """Puts back what a backward method has written over its function's arguments. Another term of the loss may read
    them later, and has a wrong gradient in the loop. The method may return this memory, so its gradients are copied."""
    changed = [(a, was) for a, was in given if not same_bits(a.detach(), was)]
    if not changed:
        return None
    own = tuple(None if g is None else g.clone() for g in own)
    for a, was in changed:
        a.data.copy_(was)  # torch takes no notice of it, as of what the method wrote
    return own


def _is_meant(own: Tensor | None, derived: Tensor | None) -> bool:
    """Returns whether a backward method passes a gradient where the derivative is 0 (straight through a rounding), or
    passes none where there is a derivative."""
    if own is None or derived is None:
        other = derived if own is None else own
        return other is not None and bool(other.any())
    return bool(((derived == 0) & (own != 0)).any())


def _moved(tensor: Tensor, along: Tensor | None, step: float) -> Tensor:
    return tensor.clone() if along is None else tensor + step * along


def _dot(some: Sequence[Any], others: Sequence[Any]) -> float:
    pairs = [(a, b) for a, b in zip(some, others, strict=True) if a is not None and b is not None]
    return float(sum(float((a.double() * b.double()).sum()) for a, b in pairs))


def _norm(tensors: Sequence[Tensor | None]) -> float:
    return _dot(tensors, tensors) ** 0.5
