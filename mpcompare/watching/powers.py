"""The power of the loss scale in each term of a loss. It is 1 where a scaler multiplied the term once."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from mpcompare.numerals import digits_of, short
from mpcompare.tasks import functions
from mpcompare.watching.events import Called, Op, Own, Root, Slot
from mpcompare.watching.examining import Replayed
from mpcompare.watching.handing_on import handed_on
from mpcompare.watching.judged import Defect
from mpcompare.watching.looking import Look
from mpcompare.watching.steps import PRODUCTS, SUMS, WEIGHS, Sum, Taken
from mpcompare.watching.tape import given

Powers = frozenset[float]  # the powers of the terms of a value; NaN: the tape cannot tell
NOTHING, OWN, UNKNOWN = Powers(), Powers({0.0}), Powers({math.nan})
QUOTIENTS = ("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__")
POWERS = ("pow", "pow_", "__pow__")
EXPONENTS = {"square": 2.0, "sqrt": 0.5, "norm": 1.0, "vector_norm": 1.0, "linalg_norm": 1.0, "linalg_vector_norm": 1.0}
LINEAR = {
    *WEIGHS, "stack", "cat", "concat", "view", "reshape", "flatten", "expand", "unsqueeze", "permute", "transpose",
    "contiguous", "clone", "double", "__getitem__", "__setitem__",
}  # fmt: skip


def of_terms(look: Look, sums: Mapping[Sum, Replayed]) -> Iterator[Defect]:
    """Yields terms of a loss that are not multiplied by the loss scale, or more than once. All gradients are divided by
    it once.

    Args:
        sums: replays whose gradients are right. So no hook has scaled a term.
    """
    for number, taken in enumerate(look.taken, start=1):
        replay = sums.get(taken.sum) if taken.sum is not None else None
        if taken.sum is None or replay is None or replay.layers is None or not _is_plain(taken):
            continue
        if not all(each.by_scaler for each in look.taken):  # some terms may be for an optimizer without a scaler
            return
        for root, powers in powers_of(taken.sum, taken.given.keys(), taken.scale):
            for power in () if any(map(math.isnan, powers)) else sorted(powers):
                if power == 0 or power >= 2:
                    how = "is" if power else "is not"
                    times = {0.0: "", 2.0: " twice"}.get(power, f" {power:g} times")
                    because = f"a term of the loss of update {number} ({root.line}) {how} multiplied by the loss scale"
                    counts = f"{short(taken.scale ** (power - 1))} times" if power else f"1/{short(taken.scale)} of"
                    yield Defect("loss scale", "", f"{because}{times}: it counts {counts} what was meant")


def _is_plain(taken: Taken) -> bool:
    """Returns whether a scaler divides gradients as backward left them by the one scale of all losses."""
    if taken.sum is None or taken.skipped or not taken.unscaled or taken.scale <= 1:
        return False
    found = handed_on(taken)
    is_same = set(taken.sum.scales) == {taken.scale} and not taken.sum.hooked & taken.given.keys()
    return is_same and found.one and not found.rest


def powers_of(seen: Sum, names: Set[str], scale: float) -> Iterator[tuple[Root, Powers]]:
    """Yields each backward that reaches some of these parameters, and the powers of the loss scale in its loss."""
    known: dict[Slot, Powers] = {}

    def of(leaf: object) -> Powers:
        if isinstance(leaf, Slot):
            return known.get(leaf, UNKNOWN if leaf.hidden else NOTHING)
        return OWN if isinstance(leaf, Own) and leaf.name in names else NOTHING

    for event in seen.tape:
        if isinstance(event, Called):
            inputs = NOTHING.union(*map(of, [*event.given.values(), *event.needs()]))
            prefix = f"{event.part}." if event.part else ""
            trains = any(name in names and name.startswith(prefix) for name in event.trained)
            made = UNKNOWN if inputs - OWN else OWN if inputs or trains else NOTHING
            known |= {slot: made for slot in (*event.slots, *(each.slot for each in event.inner)) if slot is not None}
        elif isinstance(event, Op):
            made = _of_op(event, [of(leaf) for leaf in event.leaves], scale)
            if event.differentiates and made:
                made = _of_gradient(event, of)
            known |= {slot: made for slot in (*event.results, event.writes) if slot is not None}
        elif names & event.gives and not event.hidden and all(g is None for g in event.gradients):
            yield event, NOTHING.union(*map(of, event.slots))


def _of_op(op: Op, leaves: Sequence[Powers], scale: float) -> Powers:
    """Returns the powers in the result of a function from those in its arguments."""
    terms = [powers for powers in leaves if powers]
    every = NOTHING.union(*terms)
    if op.scaled and op.name == "mul":
        return Powers(power + 1 for power in every)
    if not every or (op.name in PRODUCTS and 0 in _numbers(op)):
        return NOTHING  # a term times 0 has no gradient
    if op.hidden or any(_may_hold(number, scale) for number in _numbers(op)):
        return UNKNOWN
    if (op.name in PRODUCTS or op.func in functions.PRODUCTS) and any(map(_is_weight, op.leaves)):
        return UNKNOWN
    if every == OWN or op.name in SUMS:
        return every
    if op.name in QUOTIENTS:
        below = terms[1] if len(terms) == 2 else OWN
        return Powers(a - b for a in terms[0] for b in below) if leaves[0] else UNKNOWN
    if op.name in PRODUCTS:
        return Powers(sum(each) for each in itertools.product(*terms))
    if op.name in LINEAR:
        return every
    exponent = next(_numbers(op), math.nan) if op.name in POWERS else EXPONENTS.get(op.name, math.nan)
    return Powers(power * exponent for power in every) if len(every) == 1 else UNKNOWN


def _of_gradient(op: Op, of: Callable[[object], Powers]) -> Powers:
    """Returns the powers in the gradients that ``torch.autograd.grad`` has made."""
    args, kwargs = tree_unflatten(op.leaves, op.spec)
    names = ("outputs", "inputs", "grad_outputs")
    ends, inputs, weights = (tree_leaves(given(args, kwargs, place, name)) for place, name in enumerate(names))
    is_plain = all(bool((each == 1).all()) if isinstance(each, Tensor) else each is None for each in weights)
    is_plain &= not NOTHING.union(*map(of, inputs)) - OWN
    return NOTHING.union(*map(of, ends)) if is_plain else UNKNOWN


def _is_weight(factor: object) -> bool:
    """Returns whether a factor has many numbers, and is no mask. The loss of all samples may have left such a gradient,
    and it carries the loss scale."""
    if not isinstance(factor, Tensor) or not factor.is_floating_point() or factor.numel() == 1:
        return False
    return factor.layout is not torch.strided or bool(((factor != 0) & (factor != 1)).any())


def _numbers(op: Op) -> Iterator[float]:
    """Yields the single numbers that a function is given; whole ones, such as sizes, only where it multiplies."""
    kinds = (int, float) if op.name in (*PRODUCTS, *QUOTIENTS, *POWERS) else (float,)
    for leaf in op.leaves:
        if isinstance(leaf, kinds) or (isinstance(leaf, Tensor) and leaf.numel() == 1 and leaf.is_floating_point()):
            yield float(leaf)


def _may_hold(number: float, scale: float) -> bool:
    """Returns whether a user may have multiplied or divided a number by the loss scale: 0.1 has few digits, and 0.1 *
    1024 has more. A number with all digits is held to be a weight, such as 1 / 3, if it is neither large nor small."""
    if number == 0 or not math.isfinite(number):
        return False
    own, others = digits_of(number), [digits_of(number * scale), digits_of(number / scale)]
    return min(others) < own or (min(others) == own and not 1 / math.sqrt(scale) <= abs(number) <= 1)
