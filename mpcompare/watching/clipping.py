"""The facts on clipping: the norm, its place, and any other factor of the gradients."""

from collections.abc import Sequence
from typing import Any

from mpcompare.watching.expecting import MOST, NOT_BOUND, by_value, one
from mpcompare.watching.handing_on import HandedOn, handed_on, rounded
from mpcompare.watching.steps import Taken


def clipping_of(taken: Sequence[Taken]) -> dict[str, Any]:
    """Returns the facts on what a loop does with gradients between backward and its steps."""
    seen = [t for t in taken if t.raw and t.finite]
    steps = [handed_on(t) for t in seen]
    if not steps:
        return {"clip_norm": None}
    times = _times(seen, steps)
    bound = [h for h in steps if h.clip_norm is not None and not times]
    asked = [t.asked[0] for t in seen if t.asked is not None]
    types = sorted({t.asked[1] for t in seen if t.asked is not None})
    norms: list[float | None] = [h.clip_norm for h in bound]
    if types not in ([], [2.0]) or not norms:  # the factors tell a 2-norm, where they are not 1
        norms = list(asked)
    facts: dict[str, Any] = {"clip_norm": one(norms)}
    if types not in ([], [2.0]):
        facts["clip_norm_type"] = one(types)
    elif asked and one(norms) != one([rounded(each) for each in asked]):
        facts["clip_norm_asked"] = one(asked)
    if not norms and any(part == "norm" for t in seen for part, _ in t.order):
        facts["clip_norm"] = NOT_BOUND
    facts["gradient_norms"] = [rounded(h.norm) for h in steps]
    if bound:
        facts["clipped_updates"] = len(bound)
        place = "after backward" if steps[0].scale == 1 else "after unscaling"
        facts["clip_place"] = "before unscaling" if any(h.before_unscale for h in bound) else place
    if times := times or [rounded(h.factor) for h in steps if h.one and h.factor > 1 + 1e-4]:
        facts["gradients_times"] = one(times)
    apart = [h for h, t in zip(steps, seen, strict=True) if not (h.one or _is_within(t))]
    if apart:
        factors = {name: rounded(factor * apart[0].scale) for name, factor in apart[0].factors.items()}
        facts["factors"] = by_value(factors) if len(set(factors.values())) <= MOST else "not one for all parameters"
    if changed := sorted({n for h in steps for n in h.rest}):
        facts["changed_gradients"] = changed[:MOST] + ([f"{len(changed) - MOST} more"] if len(changed) > MOST else [])
    return facts


def _times(seen: Sequence[Taken], steps: Sequence[HandedOn]) -> list[float]:
    """Returns the number by which a loop multiplies the gradients of the updates without clipping any; empty where it
    does not. This factor is the same in all updates, and no norm is. Torch's function had nothing to do."""
    pairs = [(h, t) for h, t in zip(steps, seen, strict=True) if h.clip_norm is not None]
    factors, norms = [rounded(h.factor) for h, _ in pairs], {h.clip_norm for h, _ in pairs}
    is_norm = len(norms) < len(pairs) or (len(pairs) == 1 and float(f"{factors[0]:.1g}") != factors[0])
    if not pairs or is_norm or len(set(factors)) > 1 or any(t.outside or h.is_clipped(t) for h, t in pairs):
        return []
    by_hand = any(part == "norm" for _, t in pairs if t.asked is None for part, _ in t.order)
    return [] if by_hand else factors


def _is_within(step: Taken) -> bool:
    """Returns whether the gradients that an optimizer got are within the norm to which torch's function clips. The loop
    may have added noise before, so that no factor tells."""
    return step.asked is not None and step.asked[1] == 2 and step.norm <= step.asked[0] * (1 + 1e-4)
