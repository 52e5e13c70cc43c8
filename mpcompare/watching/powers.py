"""The power of the loss scale in each term of a loss. It is 1 where a scaler multiplied the term once.

The losses are computed again with the loss scale, twice and four times the scale. The gradient of a term with the power
p becomes 2^p and 4^p times what it was. Where all terms have the power 1, gradients are doubled, and doubled again.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from mpcompare.numerals import digits_of, short
from mpcompare.tasks import functions
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic
from mpcompare.verdict.examine.forced.kernels import Kernels
from mpcompare.verdict.examine.forced.record import Call, is_real
from mpcompare.watching.events import Called, Op, Root, Slot, needed
from mpcompare.watching.examining import Replayed
from mpcompare.watching.handing_on import handed_on
from mpcompare.watching.judged import Defect
from mpcompare.watching.looking import Look
from mpcompare.watching.network_then import as_it_was, without_autocast
from mpcompare.watching.own_functions import told
from mpcompare.watching.replaying import FromTheRoot, RecordedSum, recorded_sum
from mpcompare.watching.steps import PRODUCTS, Sum, Taken

LEAST = 1e-5  # a smaller part of a gradient is none of its terms: a user may add 1e-8 to the norm that divides a term
TIMES = (1.0, 2.0, 4.0)  # the factors of the loss scale
SAME = 0.01  # distance of equal powers
FEW = 4  # digits of a number that nobody has computed


def of_terms(look: Look, sums: Mapping[Sum, Replayed]) -> Iterator[Defect]:
    """Yields terms of a loss that are not multiplied by the loss scale, or more than once. All gradients are divided by
    it once. The losses of one update of each kind are examined.

    Args:
        sums: replays whose gradients are right. So no hook has scaled a term.
    """
    if not all(each.by_scaler for each in look.taken):  # some terms may be for an optimizer without a scaler
        return
    examined = set()
    for number, taken in enumerate(look.taken, start=1):
        replay = sums.get(taken.sum) if taken.sum is not None else None
        if taken.sum is None or replay is None or replay.layers is None or not _is_plain(taken):
            continue
        kind = taken.optimizer, *(root.line for root in taken.sum.roots)
        if kind in examined:
            continue
        examined.add(kind)
        for root, power in _powers(look, taken):
            times = "" if not power else " twice" if power == 2 else f" {power} times"
            because = (
                f"a term of the loss of update {number} ({root.line}) {'is' if power else 'is not'} multiplied by "
            )
            counts = f"{short(taken.scale ** (power - 1))} times" if power else f"1/{short(taken.scale)} of"
            yield Defect("loss scale", "", f"{because}the loss scale{times}: it counts {counts} what was meant")


def _is_plain(taken: Taken) -> bool:
    """Returns whether a scaler divides gradients as backward left them by the one scale of all losses."""
    if taken.sum is None or taken.skipped or not taken.unscaled or taken.scale <= 1:
        return False
    found = handed_on(taken)
    is_same = set(taken.sum.scales) == {taken.scale} and not taken.sum.hooked & taken.given.keys()
    return is_same and found.one and not found.rest


def _powers(look: Look, taken: Taken) -> Iterator[tuple[Root, int]]:
    """Yields each backward with terms of one other power than 1, and this power. The tape cannot tell where backward
    begins at given gradients, or where a number or a backward method of the loop may hold the scale."""
    assert taken.sum is not None
    seen, own, runs = look.sums.spool.back(taken.sum), list[type[Function]](), list[list[Tensor]]()
    given = needed(seen.ops, (slot for called in seen.calls for slot in called.needs()))
    if any(isinstance(op, Op) and op.scaled for op in given):  # the network itself is given numbers that are scaled
        return
    if any(_may_hold_the_scale(op, taken.scale) for op in seen.ops if not op.scaled):
        return
    # A loop may call functions that do not run once more, though the gradients of their results are known.
    with suppress(Exception), told(lambda kind, _: own.append(kind)), torch.enable_grad(), without_autocast():
        step = recorded_sum(seen, as_it_was(look.network, seen), look.derivatives, Kernels())
        for times in TIMES:
            replay = _OfLosses(step, times)
            replay.run()
            runs.append(replay.gradients)
    if own or len(runs) < len(TIMES):
        return
    for root, once, twice, fourfold in zip(seen.roots, *runs, strict=False):
        # Terms of the power p leave 2^p - 2 and 4^p - 4 times their gradient, and terms of the power 1 leave nothing.
        left, more = float((twice - 2 * once).norm()), float((fourfold - 4 * once).norm())
        is_plain = not root.gives.isdisjoint(taken.given) and all(g is None for g in root.gradients)
        if is_plain and left * taken.scale > LEAST * float(once.norm()):  # a term that is not scaled counts little
            power = math.log2(max(more / left - 2, 0.5))
            if power > -SAME and abs(power - round(power)) < SAME and round(power) != 1:
                yield root, round(power)


class _OfLosses(FromTheRoot):
    """A replay of the losses with another loss scale. It calls the network only if gradients are differentiated.

    Attributes:
        gradients: of each root the gradients of the outputs of the network, and of parameters, in one row.
    """

    def __init__(self, step: RecordedSum, times: float) -> None:
        super().__init__(step, Arithmetic(torch.float64))
        self.times = times
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor] = []

    @contextmanager
    def forcing(self) -> Iterator[None]:
        """Leaves the layers as they are."""
        yield

    def play(self, op: Op, *args: Any) -> None:
        if op.scaled and op.name == "mul":
            op = replace(op, leaves=[self.times * v if is_real(v) else v for v in op.leaves])
        super().play(op, *args)

    def _called(self, event: Called, call: Call, values: dict[Slot, Tensor]) -> Any:
        if self.is_open:
            return super()._called(event, call, values)
        made = zip(event.slots, call.outputs, strict=True)
        for slot, value in (*made, *((each.slot, each.value) for each in event.inner)):
            if slot is not None:
                self.outputs.append(value.to(self.dtype, copy=True).requires_grad_())
                values[slot] = self.outputs[-1].clone()  # a loop may write into it
        return [slot and values[slot] for slot in event.slots]

    def back(self, root: Root, values: Mapping[Slot, Tensor]) -> None:
        super().back(root, values)
        leaves = [*self.outputs, *self.weights.between.values()]
        self.gradients.append(torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None]))
        for leaf in leaves:
            leaf.grad = None


def _may_hold_the_scale(op: Op, scale: float) -> bool:
    """Returns whether a user may have multiplied or divided a number of a function by the loss scale, or many numbers:
    the loss of all samples may have left such a gradient, and it carries the scale."""
    is_product = op.name in PRODUCTS or op.func in functions.PRODUCTS
    for v in op.leaves:
        if isinstance(v, (int, float)) or (is_real(v) and v.numel() == 1):
            # A number in a tensor may be computed, such as the norm of a gradient.
            if _may_hold(float(v), scale) or (isinstance(v, Tensor) and digits_of(float(v)) > FEW):
                return True
        elif is_real(v) and is_product and (v.layout is not torch.strided or bool(((v != 0) & (v != 1)).any())):
            return True
    return False


def _may_hold(number: float, scale: float) -> bool:
    """Returns whether a number may hold the loss scale: 0.1 has few digits, and 0.1 * 1024 has more. A number with all
    digits is held to be a weight, such as 1 / 3, if it is neither large nor small."""
    if number == 0 or not math.isfinite(number):
        return False
    own, others = digits_of(number), [digits_of(number * scale), digits_of(number / scale)]
    return min(others) < own or (min(others) == own and not 1 / math.sqrt(scale) <= abs(number) <= 1)
