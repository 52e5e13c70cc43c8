"""Gradients on their way from backward to the optimizer: unscaled, clipped, or changed; and the facts on that."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpcompare.verdict.examine.errors import UNIT_ROUNDOFF
from mpcompare.verdict.examine.numerics import short_share
from mpcompare.watching.expecting import MOST, NOT_BOUND, by_value, one
from mpcompare.watching.steps import Taken

SHORT = 0.9  # a tensor has 16-bit digits if more of its numbers have them: in a sum some have them by chance
SAME = 64 * UNIT_ROUNDOFF  # distance of equal factors: roundings of a norm, its quotient, a product, and their sums

CLIPS = ("mul", "div", "clamp")  # parts of the names of operators that clip


@dataclass(frozen=True)
class HandedOn:
    """The changes of gradients between backward and step."""

    factor: float  # the factor of all gradients together, without the loss scale; NaN where there is none
    one: bool  # whether all gradients have this factor
    norm: float  # the 2-norm of all raw gradients together, without the loss scale
    together: float  # the same with the gradients of others that were clipped together with them
    rest: Mapping[str, float]  # by parameter the relative norm of what no factor explains, beyond roundings
    factors: Mapping[str, float]  # by parameter its own factor, the loss scale included
    short: list[str]  # the parameters whose gradients have 16-bit digits, and had more digits before
    scale: float  # the loss scale in the raw gradients
    before_unscale: list[str]  # the operators that clipped gradients before they were unscaled, with their lines

    @property
    def clip_norm(self) -> float | None:
        """The norm to which the gradients were clipped; None if they were not clipped."""
        clipped = self.one and self.factor < 1 - SAME and not self.rest
        return rounded(self.factor * (self.together + 1e-6)) if clipped else None

    def is_clipped(self, step: Taken) -> bool:
        """Returns whether torch's function clipped the gradients of this step, while they were scaled or not."""
        norms = step.norm, step.norm * self.scale
        return step.asked is not None and any(math.isclose(norm, step.asked[0], rel_tol=1e-3) for norm in norms)

    @property
    def is_with_others(self) -> bool:
        """Whether torch's function clipped gradients of others together with these."""
        return self.together > self.norm * (1 + SAME)

    @property
    def still_scaled(self) -> list[str]:
        """The parameters whose factors are the loss scale times the least factor: nobody divided their gradients."""
        least = min((f for f in self.factors.values() if f > 0), default=math.nan)
        return [
            n for n, f in self.factors.items() if self.scale != 1 and math.isclose(f, self.scale * least, rel_tol=SAME)
        ]


def handed_on(step: Taken) -> HandedOn:
    """Returns what became of the gradients of a step."""
    scale = step.scale if step.scaled else 1.0
    square = product = 0.0
    factors: dict[str, float] = {}
    rest: dict[str, float] = {}
    short = []
    for name, given in step.given.items():
        raw = step.raw.get(name)
        if raw is None or step.dtypes[name] != "fp32":
            continue
        before, after = raw.double().flatten(), given.double().flatten()
        size = float(before @ before)
        if not size or not math.isfinite(size):
            continue
        factors[name] = float(before @ after) / size
        square, product = square + size, product + float(before @ after)
        left = float((after - factors[name] * before).norm()) / math.sqrt(size) / max(abs(factors[name]), 1e-300)
        if not left <= 8 * UNIT_ROUNDOFF:
            rest[name] = left
        others = raw, (raw.double() * factors[name]).float()
        inner = (given > given.min()) & (given < given.max())  # clamped numbers have few digits, such as 0.5
        if short_share(given[inner]) > SHORT and max(short_share(each[inner]) for each in others) < 0.5:
            short.append(name)
    factor = product / square if square else math.nan
    one = all(math.isclose(f, factor, rel_tol=SAME) for f in factors.values())
    norm = math.hypot(*(step.norms[n] for n in step.given if n in step.norms)) / scale
    parts = [part for part, _ in step.order]
    # A fused optimizer unscales in its step, after all these parts.
    end = parts.index("unscale") if "unscale" in parts else len(parts) if step.unscaled else 0
    earlier = [f"{part} at {line}" for part, line in step.order[:end] if clips(part)]
    together, clip = norm, step.clip
    if clip and (own := clip.norm_of(step.settings, scale)):
        together = norm * clip.norm_of(clip.norms, scale) / own
    if clip and not earlier and step.unscaled and scale != 1 and not clip.scaled.isdisjoint(step.settings):
        earlier = [f"norm at {clip.line}"]  # another optimizer has taken its step since
    return HandedOn(factor * scale, one, norm, together, rest, factors, short, scale, earlier)


def clips(part: str) -> bool:
    """Returns whether an operator that changes gradients may clip them."""
    return any(word in part for word in CLIPS)


def rounded(value: float) -> float:
    """Returns a number in the four digits in which factors are known."""
    return float(f"{value:.4g}")


def clipping_of(taken: Sequence[Taken]) -> dict[str, Any]:
    """Returns the facts on what a loop does with gradients between backward and its steps."""
    seen = [t for t in taken if t.raw and t.finite]
    steps = [handed_on(t) for t in seen]
    if not steps:
        return {"clip_norm": None}
    times = _times(seen, steps)
    bound = [h for h in _together(seen, steps) if h.clip_norm is not None and not times]
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
    if decays := [rounded(c) for t in seen if (c := decay_of(t)) is not None]:
        facts["decay_in_gradients"] = one(decays)
    return facts


def decay_of(step: Taken) -> float | None:
    """Returns c where a loop adds c times the weights to the gradients of several parameters; None where it adds
    nothing or something else."""
    by = step.scale if step.scaled else 1.0
    raw = {n: g.double() / by for n, g in step.raw.items() if n in step.given and step.dtypes[n] == "fp32"}
    added = {n: step.given[n].double() - g for n, g in raw.items() if g.shape == step.before[n].shape}
    names = [n for n, a in added.items() if bool(a.any())]
    square = sum(float(step.before[n].double().square().sum()) for n in names)
    if len(names) < 2 or not 0 < square < math.inf or step.clip is not None:
        return None
    c = sum(float((added[n] * step.before[n]).sum()) for n in names) / square
    for n in names:
        decay = c * step.before[n].double()
        bound = 8 * UNIT_ROUNDOFF * (raw[n].abs() + decay.abs())
        if not bool(((added[n] - decay).abs() <= bound).all()) or float(decay.norm()) < 8 * float(bound.norm()):
            return None
    return c


def _together(seen: Sequence[Taken], steps: Sequence[HandedOn]) -> Iterator[HandedOn]:
    """Yields the steps. Where one factor has changed the gradients of several optimizers, and not torch's function, the
    loop has clipped these to one norm."""
    for taken, h in zip(seen, steps, strict=True):
        alike = [
            other.norm
            for t, other in zip(seen, steps, strict=True)
            if t.sum is taken.sum and math.isclose(other.factor, h.factor, rel_tol=SAME)
        ]
        yield h if taken.clip is not None else replace(h, together=math.hypot(*alike))


def _times(seen: Sequence[Taken], steps: Sequence[HandedOn]) -> list[float]:
    """Returns the number by which a loop multiplies the gradients of the updates without clipping any; empty where it
    does not. This factor is the same in all updates, and no norm is. Torch's function had nothing to do."""
    pairs = [(h, t) for h, t in zip(steps, seen, strict=True) if h.clip_norm is not None]
    factors, norms = [rounded(h.factor) for h, _ in pairs], {h.clip_norm for h, _ in pairs}
    is_single = len({t.sum for _, t in pairs}) == 1
    is_norm = len(norms) < len(pairs) or (is_single and float(f"{factors[0]:.1g}") != factors[0])
    if not pairs or is_norm or len(set(factors)) > 1 or any(h.is_with_others or h.is_clipped(t) for h, t in pairs):
        return []
    by_hand = any(part == "norm" for _, t in pairs if t.asked is None for part, _ in t.order)
    return [] if by_hand else factors


def _is_within(step: Taken) -> bool:
    """Returns whether the gradients that an optimizer got are within the norm to which torch's function clips. The loop
    may have added noise before, so that no factor tells."""
    return step.asked is not None and step.asked[1] == 2 and step.norm <= step.asked[0] * (1 + 1e-4)
