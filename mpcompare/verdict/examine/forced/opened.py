"""A call whose gradients are differentiated again, as by a gradient penalty.

The functions of a forced call are hidden within one function of ours, and autograd does not look into that. Here they
are a part of the graph: each operand, each result and each gradient that arrives is only given the recorded numbers.
The gradient of a gradient then goes through the derivatives of all functions, in float64. Nobody recorded what arrives
at a gradient from there: it is the replay's own.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcompare.tasks.cast import STAY_IN_FP32
from mpcompare.verdict.examine.forced.call import At, ForcedLayer
from mpcompare.verdict.examine.forced.instead import Instead
from mpcompare.verdict.examine.forced.record import is_real, is_tracked
from mpcompare.verdict.examine.unseen import Unseen


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
        _note(at)
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


def _note(at: ForcedLayer) -> None:
    """Notes which parameters the layer uses."""
    replay, held = at.replay, at.call.held
    outputs = sum(v.numel() for v in at.call.outputs if is_real(v))
    for name, p in at.module.named_parameters():
        full = replay.weights.names[id(p)]
        replay.users.setdefault(full, set()).add(at.name)
        if isinstance(at.module, STAY_IN_FP32) and held.get(name) is torch.float32:
            at.note_in_fp32(name, full, outputs / max(p.numel(), 1))
