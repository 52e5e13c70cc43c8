"""A forced call: it compares and passes on, forward and backward.

It is one function of autograd, and the functions of the call are hidden within. Autograd does not look into that. So a
call whose gradients are differentiated again, as by a gradient penalty, is passed openly: there the functions are a
part of the graph. Each operand, each result and each gradient that arrives is only given the recorded numbers. The
gradient of a gradient then goes through the derivatives of all functions, in float64. Nobody recorded what arrives at a
gradient from there: it is the replay's own.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from mpcompare.tasks.cast import STAY_IN_FP32
from mpcompare.verdict.examine.forced.arithmetic import Point
from mpcompare.verdict.examine.forced.call import At, ForcedLayer, alike, numbers_in
from mpcompare.verdict.examine.forced.choices import in_backward
from mpcompare.verdict.examine.forced.instead import Instead
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError
from mpcompare.verdict.examine.forced.record import is_real, is_tracked
from mpcompare.verdict.examine.unseen import Unseen


class Forced(torch.autograd.Function):
    """Compares what arrives at a call with the record, and passes on the record, forward and backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, at: At, *xs: Any):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        with Unseen() as unseen:
            ctx.at, replay, arithmetic, name, call = at, at.replay, at.arithmetic, at.name, at.call
            layer = at if isinstance(at, ForcedLayer) else None
            arithmetic.whose("", name)
            if layer is None:
                ctx.values, ctx.params, ctx.results = list(xs), {}, list(xs)
            else:
                at.given(xs)
                if name in arithmetic.known:
                    arithmetic.known.forward(layer)
                    return tuple(alike(y, arithmetic.operand(numbers_in(y, replay.dtype))) for y in call.outputs)
                ctx.values, ctx.params = layer.operands()
                if not any(call.passes):  # positions and masks are no quantities that a precision rounds
                    arithmetic.passing("constant")
                arithmetic.whose("forward", name)
                marks = layer.marks(ctx.params)
                with unseen.lifted(), torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
                    ctx.results = layer.forward(ctx.values, ctx.params)
                written = {name for name, mark in layer.marks(ctx.params).items() if mark != marks[name]}
                written |= layer.copied()
                arithmetic.whose("", name)
            passed = at.returns(ctx.results)
            untracked = [p for p, y in zip(passed, ctx.results, strict=False) if is_real(p) and not y.requires_grad]
            if layer is not None:
                if not in_backward():  # if a checkpoint makes the operands again, backward needs them
                    layer.free(ctx.values, {name: p for name, p in ctx.params.items() if name not in written})
                ctx.mark_non_differentiable(*untracked)
                arithmetic.whose("forward", "")
            ctx.results = [_place(y) if is_real(y) else None for y in ctx.results]
            return tuple(passed)

    @staticmethod
    def backward(ctx: Any, *arriving: Any):  # type: ignore[no-untyped-def]
        with Unseen() as unseen:
            replay, arithmetic, call = ctx.at.replay, ctx.at.arithmetic, ctx.at.call
            layer = ctx.at if isinstance(ctx.at, ForcedLayer) else None
            arithmetic.whose("", ctx.at.name)
            exact = [None if g is None else replay._unscaled(g) for g in arriving]
            if layer is None:
                replay.comes_to(call, exact)
            elif ctx.at.name in arithmetic.known:
                right = torch.zeros_like(call.outputs[0]) if exact[0] is None else exact[0]
                replay.tell(Point("gradient", ctx.at.name), right, right, right.dtype)
                passed_down = arithmetic.known.backward(ctx.at, right)
                return (None,) * 2 + tuple(passed_down if is_real(value) else None for value in call.inputs)
            if ctx.results is None:
                raise NotReplayedError(f"one backward comes to {ctx.at.name or 'the network'} several times")
            ends, grads, passed = [], [], dict[int, Tensor]()
            for place, (end, g, recorded) in enumerate(zip(ctx.results, exact, call.gradients, strict=False)):
                if g is None and recorded is None:
                    continue
                right = replay.zero.new_zeros(call.outputs[place].shape) if g is None else g
                taken = ctx.at.arrives(place, recorded, right)
                if end is not None:
                    ends.append(end)
                    grads.append(taken)
                    passed[place] = taken
            if layer is None:  # a network may return one tensor twice
                arithmetic.whose("backward", f"before {ctx.at.name}")
                return (None,) * 2 + tuple(passed.get(place) for place in range(len(ctx.values)))
            numbers = [v for v in ctx.values if is_tracked(v)]
            params = [p for p in ctx.params.values() if p.requires_grad]
            wanted = numbers + params
            layer.fill(ctx.values, ctx.params)
            arithmetic.whose("backward", ctx.at.name)
            edges = list(map(get_gradient_edge, wanted))  # with edges torch takes no mode off: see ``backward``
            with unseen.lifted():
                found = iter(torch.autograd.grad(ends, edges, grads, allow_unused=True) if ends else ())
            arithmetic.whose("", ctx.at.name)
            back = tuple(
                numbers_in(next(found, None), replay.dtype, copy=False) if is_tracked(v) else None for v in ctx.values
            )
            for place, g in enumerate(back):
                if g is not None:
                    passed = replay._unscaled(g)
                    replay.tell(Point("back", ctx.at.name, ctx.at.number, place), passed, passed, torch.float32)
            del params, wanted
            layer.free((), ctx.params)
            layer.add_gradients(ctx.params, found, grads)
            ctx.results = ctx.values = ctx.params = None
            arithmetic.whose("backward", f"before {ctx.at.name}")
            return (None,) * 2 + back


def _place(result: Tensor) -> Tensor | GradientEdge | None:
    """Returns the place of a result in autograd's graph, so that its numbers may be freed; None where it requires no
    gradient."""
    if not result.requires_grad:
        return None
    return result if result.is_leaf else get_gradient_edge(result)


def _itself(saved: Tensor) -> Tensor:
    """Stands in the place of a checkpoint's hooks within a layer. The layer has a graph of its own, and for each
    backward through another graph a checkpoint computes all of its layers once more."""
    return saved


def passed_openly(at: At, xs: Sequence[Any]) -> list[Any]:
    """Compares what arrives at a call, and passes on what was recorded of it."""
    replay = at.replay
    at.arithmetic.whose("", at.name)
    results = list(xs)
    if isinstance(at, ForcedLayer):
        with Unseen():
            at.given(xs)
            operands, params = at.operands()
        values = [_instead(x, operand) for x, operand in zip(xs, operands, strict=True)]
        own = {name: _instead(replay.weights.taken(p), params[name]) for name, p in at.module.named_parameters()}
        at.arithmetic.whose("forward", at.name)
        results = at.forward(values, own)
        at.arithmetic.whose("", at.name)
        outputs = sum(v.numel() for v in at.call.outputs if is_real(v))
        for name, p in at.module.named_parameters():
            full = replay.weights.names[id(p)]
            replay.users.setdefault(full, set()).add(at.name)
            if isinstance(at.module, STAY_IN_FP32) and at.call.held.get(name) is torch.float32:
                at.note_in_fp32(name, full, outputs / max(p.numel(), 1))
    with Unseen():
        returned = at.returns(results)
    passed = [_instead(y, numbers) for y, numbers in zip(results, returned, strict=False)]
    # The derivative of a layer may use its result, as the derivative of tanh does. So the gradient of a gradient may
    # come to a result within the layer. The network may use what it returns, too.
    ends = results if isinstance(at, ForcedLayer) else passed
    for place, y in enumerate(ends):
        if is_tracked(y):
            y.register_hook(partial(_arrives, at, place))
    if isinstance(at, ForcedLayer):
        at.arithmetic.whose("forward", "")
    return passed


def _instead(value: Any, numbers: Any) -> Any:
    """Returns a value that goes on from other numbers."""
    if not is_real(value) or not is_real(numbers):
        return numbers
    return Instead.apply(value, numbers.detach().to(value.dtype))


def _arrives(at: At, place: int, gradient: Tensor) -> Tensor:
    """Compares a gradient, and returns a gradient that goes on from its recorded numbers. At the output of the network
    only the first gradient is compared. Later ones come from gradients of gradients, and are not the loss's."""
    call = at.call
    at.arithmetic.passing("backward")
    turn = at.turns.setdefault(torch._C._current_graph_task_id(), len(at.turns))
    if turn and not isinstance(at, ForcedLayer):
        return gradient
    passes = [call.gradients, *call.later.values()]
    seen = passes[turn][place] if turn < len(passes) else None
    with Unseen():
        taken = at.arrives(place, seen, gradient.detach(), turn)
    return _instead(gradient, taken) if torch.is_grad_enabled() else taken.to(gradient.dtype)
