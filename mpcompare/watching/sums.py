"""Follows the sums of gradients: where they begin, what they are made of, and what is done to them.

A sum begins where a backward finds no gradient. Neither ``zero_grad`` nor a step tells: nobody calls a skipped step,
and loops clear their gradients before, between and after.
"""

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mpcompare.instruments import fp32_products
from mpcompare.tasks.functions import writes_into_first
from mpcompare.verdict.examine.numerics import numbers, total_norm
from mpcompare.verdict.examine.seen import all_finite
from mpcompare.watching.attach import Attached
from mpcompare.watching.calls import Calls
from mpcompare.watching.events import Root
from mpcompare.watching.guard import Guard
from mpcompare.watching.left import Left, is_there
from mpcompare.watching.steps import CalledClip, Sum
from mpcompare.watching.tape import given, line_of_user

NORMS = ("_foreach_norm", "linalg_vector_norm", "norm", "vector_norm", "linalg_norm")
CLIPPING = (torch.clamp, torch.tensor)  # torch's clipping calls one of them where it finds no gradients
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class Sums:
    """The sum of gradients that is under way."""

    def __init__(self, attached: Attached, guard: Guard) -> None:
        self.attached, self.calls = attached, Calls(attached.network, guard)
        self.params, self.spool = self.calls.params, self.calls.spool
        self.left = Left(self.params, self.spool, self.calls.hide)
        self.order: list[tuple[str, str]] = []  # what was done to gradients since the last backward, with lines
        self.asked: tuple[float, float] | None = None  # norm and type to which torch was asked to clip since then
        self.clips: dict[str, CalledClip] = {}  # by parameter the call that clipped its gradient since then
        self.used = 0  # the number of the last backward that a step used
        self.clipped_early = ""  # the line that clips before backward has made any gradient
        self.clipped_late = ""  # the line that clips after the step that used the gradients
        self.kept_bad = ""  # the line that clips gradients of inf or NaN, to which backward then adds more
        self._clipped = ""  # the norm and the line that clip between backward passes of this sum
        self._clips = False  # whether the gradients of the last step were clipped by torch's function
        self.backwards = self._dropped = self._given_up = 0
        self._closed: dict[frozenset[str], Sum] = {}  # by parameters of an optimizer; by none: of all optimizers
        self._stale: list[str] = []  # the parameters whose gradients hold the gradients of the update before, too
        # those of them that a step has used, or whose gradients are another loss's, and that the loop left as they were
        self._forgotten: set[str] = set()
        self._stepped: dict[str, int] = {}  # how often each gradient had been written to at the last step
        self._updated: set[str] = set()  # the parameters whose gradients a step has used, and nobody has cleared
        self._line = ""  # the line of the last backward
        self._read = False  # whether the loop has read gradients since the last backward, other than to clip them
        self._stopped = False  # whether the last backward has stopped with an error
        self._again = False  # whether the loop may differentiate the gradients of a backward again
        self._apart = False  # whether the optimizers have sums of their own: the loop clears their gradients in turns

    @property
    def names(self) -> dict[int, str]:
        """The names of weights, by ``id`` of a weight or of its master."""
        return self.calls.names | {id(p): name for name, p in self.attached.masters.items()}

    def owned(self) -> set[str]:
        """Returns the names of the parameters that optimizers have. Parameters that came after the look began are left
        out."""
        return self.attached.owned() & self.params.keys()

    def backward(self, args: Any, kwargs: Any) -> Root | None:
        """Returns the root of a ``backward`` that is called next; None where it does not come to the network."""
        tensors, gradients = begins_at(args, kwargs)
        root = self.calls.tape.root(tensors, gradients, line_of_user())
        if not self.calls.concerns(root, tensors):
            return None
        again = bool(given(args, kwargs, 3, "create_graph"))
        root.retains = again or bool(given(args, kwargs, 2, "retain_graph"))
        self._again |= again
        if root.hidden and self._again:
            self.calls.hide(f"a loss depends on {root.hidden}, which a replay does not make")
        if root.on_inner and root.hidden:
            self.calls.hide(f"a loss depends on {root.hidden} within the network, which it does not return")
        if kwargs.get("inputs") is not None:
            root.of_some = True
            self.calls.hide("a backward is asked for the gradients of some tensors alone")
        self._begin(root)
        return root

    def asks(self, args: Any, kwargs: Any) -> Callable[[Any], None]:
        """Is told of ``torch.autograd.grad`` before it is called, and returns what is to be told of its result."""
        again = bool(given(args, kwargs, 4, "create_graph"))
        retains = again or bool(given(args, kwargs, 3, "retain_graph"))
        tape = self.calls.tape
        begun = tape.begin(torch.autograd.grad, args, kwargs, False) if again else None
        tape.under_way = None  # the operators of backward are no part of the loss

        def end(result: Any) -> None:
            self.calls.passed(retains)
            if begun is not None:
                tape.end(*begun, result)

        return end

    def passed(self, root: Root) -> None:
        """Is told that ``backward`` has come to its end."""
        root.gives = self.left.given()
        if self.left.changed & root.gives and (self.asked is not None or self._apart):
            self.calls.hide("the loop clips the gradients between its backward passes")
            lines = {each.line for each in self.calls.roots()}
            if self.asked is not None and lines == {root.line}:  # one loss; several may be clipped apart on purpose
                self._clipped = f"to {self.asked[0]:g} ({next(line for part, line in self.order if part == 'norm')})"
        self.calls.passed(root.retains, root)
        self.left.note(self.owned(), root.gives)
        self.order, self._read, self._stopped = [("backward", root.line)], False, False
        self.asked, self.clips = None, {}

    def stopped(self) -> None:
        """Is told that a backward has stopped with an error. The graph may be left for another one."""
        self.calls.passed(True)
        self.left.note(self.owned(), self.params.keys())
        self._stopped = True

    def _begin(self, root: Root) -> None:
        """Finds out whether a sum begins."""
        self.backwards += 1
        self._closed = {}
        owned = self.owned()  # an optimizer clears its own gradients
        # A loop may freeze a discriminator, whose gradients no step has used, for the loss of the generator.
        waiting = {n for each in self.calls.roots() if self.used < self.backwards - 1 for n in each.gives}
        trained = [n for n, p in self.params.items() if n in owned and (p.requires_grad or n in waiting)]
        empty = {n for n in trained if not is_there(self.params[n].grad) and not self._is_left(n)}
        self._updated -= empty
        kept = [n for n in trained if n not in empty]
        if not kept:
            self._stale = []
            made = self.calls.made()
            used = [called for called in made if called.passes]
            # The gradients of such calls may have moved the weights, or belong to the inputs.
            meant = any(called.moves < self.calls.moves for called in used) or any(called.foreign for called in made)
            if self.used < self.backwards - 1 and used and not meant:
                roots = len(self.calls.roots())
                if all_finite(self.left.grads):
                    self._dropped += 0 if self._read or self._stopped or self.left.is_held() else roots
                else:
                    self._given_up += roots
            self._fresh()
        elif self.used == self.backwards - 1 and self.used:
            self._stale = kept
            changed = {n for n in kept if self.params[n].grad is not self.left.grads.get(n)}  # as a momentum by hand
            changed |= {n for n, version in self._versions_now().items() if version != self._stepped.get(n)}
            # A loop may update some parameters less often than it takes gradients of one loss.
            self._forgotten = set(kept if root.line != self._line else self._updated.intersection(kept)) - changed
            self._fresh()
        elif self._stopped:
            self.calls.hide("a backward stopped with an error, and the loop goes on without clearing the gradients")
        elif self.asked is not None and self.asked[0] < math.inf and not all_finite(self.left.grads):
            self.kept_bad = next(line for part, line in self.order if part == "norm")
        else:
            self.left.changed = {n for n in kept if self.left.is_changed(n)}
            if (cleared := empty & self.left.grads.keys()) and not self.left.were_0(cleared):
                self._apart, self._stale = True, [n for n in self._stale if n not in cleared]
            for each in self.calls.roots():
                each.cleared |= each.gives & cleared
                each.gives -= cleared
        self._line = root.line
        self.left.begins(owned)

    def _fresh(self) -> None:
        """Drops everything but the calls of the network that another backward may come through."""
        self._clipped, self._apart, self.left.kept = "", False, {}
        self.calls.drop_used()

    def _is_left(self, name: str) -> bool:
        """Returns whether a gradient is as the last backward left it. A gradient of 0 may be so, too."""
        written = any(part not in ("backward", "norm") for part, _ in self.order)  # as by p.grad.data.fill_(0)
        return self.left.is_untouched(name) and not written

    def touched(self, func: Any, args: Any, kwargs: Any) -> None:
        """Is told of each function before it is called, and notes what is done with gradients."""
        name = str(getattr(func, "__name__", ""))
        if func in CLIPPING:
            is_early = self.used == self.backwards and not any(is_there(p.grad) for p in self.params.values())
            if is_early and not self.names.keys().isdisjoint(map(id, _clipped_by_torch())):  # else another network
                self.clipped_early = line_of_user()
            return
        written, out = args[:1], [kwargs.get("out")]
        if self._has_any(tree_leaves(out)):  # as torch.nan_to_num(p.grad, out=p.grad)
            part, written = name, out
        elif name in NORMS:
            part = "norm"
        elif writes_into_first(func) or name == "__set__":
            part = "unscale" if name == UNSCALE else name.strip("_")
            self._read |= self._has_any(tree_leaves(args[1:]))  # as a sum of the loop's own: total += p.grad
        else:
            self._read |= self._has_any(tree_leaves(args))
            return
        targets = written[0] if written and isinstance(written[0], (list, tuple)) else written
        if self._has_any(targets):
            if part == "norm":
                clip = _clip()
                asked = (float(clip["max_norm"]), float(clip.get("norm_type", 2.0))) if clip else None
                if asked is not None and self._is_late(asked):
                    self.clipped_late = line_of_user()
                elif asked is not None and self.used < self.backwards:
                    self.clipped_early = ""
                self.asked, self._read = asked or self.asked, self._read or asked is None
                if asked is not None:
                    self._clip_together(asked, targets)
            else:
                self.left.keep()
            entry = (part, line_of_user())
            if self.order[-1:] != [entry]:
                self.order.append(entry)

    def _clip_together(self, asked: tuple[float, float], targets: Sequence[Any]) -> None:
        """Is told that torch's function takes the norms of some gradients, and notes all that it clips."""
        names, known = self.names, _clipped_by_torch()
        grads = {names[id(p)]: p.grad for p in known if id(p) in names and p.grad is not None}
        if any(t is next(iter(grads.values()), None) for t in targets):  # it may be called with one after the other
            is_alone = len(self.attached.optimizers) == 1 and grads.keys() <= self.owned()
            norms = {} if is_alone else {n: total_norm({n: numbers(g)}, 2.0) for n, g in grads.items()}
            self.left.keep()
            raw = {n: left.norm for n, left in self.left.kept.items() if n in norms}
            scaled = {n for n, norm in raw.items() if norm and math.isclose(norms[n], norm, rel_tol=1e-4)}
            if scaled or "unscale" in dict(self.order):  # else the loop divides by hand, and may well divide all
                scaled |= norms.keys() - raw.keys()  # a scaler divides no gradient that no optimizer has
            self.clips |= dict.fromkeys(grads, CalledClip(asked, line_of_user(), norms, frozenset(scaled)))

    def _has_any(self, values: Sequence[Any]) -> bool:
        """Returns whether some of these values are gradients of weights, or of their masters."""
        return self.left.has_any(values, [p.grad for p in self.attached.masters.values() if p.grad is not None])

    def _versions_now(self) -> dict[str, int]:
        """Returns, by parameter, how often its gradient has been written to."""
        return {name: p.grad._version for name, p in self.params.items() if p.grad is not None}

    def _is_late(self, asked: tuple[float, float]) -> bool:
        """Returns whether torch's function clips gradients after the step that used them. They were not clipped before,
        and their norm is larger."""
        if self.used != self.backwards or self._clips:
            return False
        return asked[0] < total_norm({name: numbers(g) for name, g in self.left.grads.items()}, asked[1]) < math.inf

    def close(self, names: Collection[str]) -> Sum | None:
        """Returns the sum that is there; None where no backward came since the last step that closed one.

        Args:
            names: the parameters that are updated with it. Others may still have the gradients of an earlier update, as
                a discriminator has if the loss of a generator goes through it.
        """
        key = frozenset(names if self._apart else ())
        if key in self._closed or not self.left.grads or (self.used == self.backwards and not self._closed):
            return self._closed.get(key)
        self.left.keep()
        self.kept_bad = ""  # a step uses them
        record, tape, used = self.calls.of_sum(key if self._apart else None)
        ours = {handle.id for handle in self.calls.recorder.handles}
        stale, others = [n for n in self._stale if n in names], {n for n in self._stale if n not in names}
        forgotten = [n for n in stale if n in self._forgotten]
        if stale:
            self.calls.hide("the gradients of the update before are still in them")
        if self._apart:
            others = self.owned() - key
        self._closed[key] = Sum(
            record=record,
            tape=tape,
            grads={n: g for n, g in self.left.kept.items() if n not in others},
            weights=used[0].weights if used else {},
            first=used[0] if used else None,
            buffers_after=used[-1].after if used and used[-1].number < self.calls.count else self.calls.buffers(),
            stale=forgotten,
            dropped=self._dropped,
            given_up=self._given_up,
            hidden=self.calls.reasons.first or ("" if used else "no call of the network with gradients was seen"),
            training=self.calls.training,
            owned=self.owned() - others,
            hooked={n for n, p in self.params.items() if (p._backward_hooks or {}).keys() - ours or hooks_after(p)},
            autocast=self.calls.autocast(record),
            tf32=fp32_products.are_tf32(self.calls.network, next(iter(self.params.values())).device),
            clipped=self._clipped,
        )
        self._dropped = self._given_up = 0
        return self._closed[key]

    def stepped(self, names: Collection[str], skipped: bool) -> None:
        """Is told that a step with the gradients of these parameters was taken, or skipped."""
        self._updated.update(names)
        self._clips, self._stepped = self.asked is not None, self._versions_now()
        self.used, self.order, self.asked = self.backwards, [], None
        self.clips = {n: clip for n, clip in self.clips.items() if n not in names}
        self.calls.reasons.age()
        if not skipped:
            self.calls.moved_on()

    def forget(self) -> None:
        """Frees everything that only the next step would need."""
        self.left.forget()
        self._closed = {}
        self.calls.moved_on()


def begins_at(args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns the tensors at which a backward begins, and the gradients that it is given there."""
    first = given(args, kwargs, 0, "tensors")
    tensors = list(first) if isinstance(first, (list, tuple)) else [first]
    gradient = given(args, kwargs, 1, "gradient" if "gradient" in kwargs else "grad_tensors")
    return tensors, list(gradient) if isinstance(gradient, (list, tuple)) else [gradient] * len(tensors)


def hooks_after(p: Tensor) -> bool:
    """Returns whether hooks are called when the gradient of a parameter is there, such as hooks that update it."""
    return bool(getattr(p, "_post_accumulate_grad_hooks", None))


def _clip() -> Mapping[str, Any]:
    """Returns the variables of torch's function that clips to a norm, if it calls us; none if it does not."""
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad" and "max_norm" in frame.f_locals:
            return frame.f_locals
    return {}


def _clipped_by_torch() -> Sequence[Any]:
    """Returns the parameters whose gradients torch's function clips; none if it is not called."""
    params = _clip().get("parameters")
    return params if isinstance(params, (list, tuple)) else ()
