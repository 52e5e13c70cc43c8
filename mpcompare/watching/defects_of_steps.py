"""Defects of a step: its gradients, the moments that it keeps, and the weights and buffers that it leaves."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpcompare.clipping import USUAL_NORMS, factor_of_norm
from mpcompare.numerals import digits_of, short
from mpcompare.verdict.examine.errors import UNIT_ROUNDOFF
from mpcompare.verdict.judge.check import listed
from mpcompare.watching.handing_on import SAME, HandedOn, clips, handed_on
from mpcompare.watching.judged import Defect
from mpcompare.watching.looking import Look
from mpcompare.watching.steps import Taken, in_turn, moved

ADDS = ("add", "sub", "lerp")  # parts of the names of functions that add something to a gradient
LOST = 0.5  # a tensor does not train as it should if more of the squares of its gradients are 0


def of_step(look: Look, number: int, taken: Taken) -> Iterator[Defect]:
    """Yields what is wrong in one step: in the gradients that it is given, and in the weights and buffers after it."""
    where = f"in step {number}"
    if (taken.scaled or taken.scale != 1) and not taken.skipped and not taken.finite:
        because = f"step {number} is taken with gradients that hold inf or NaN: the scaler "
        because += "should have skipped it" if taken.by_scaler else "does not take it, the loop does"
        yield Defect("skip", "", because)
    if taken.by_scaler and taken.scaled and not taken.skipped and taken.finite and (hidden := taken.overflowed):
        because = f"step {number} is taken, and the gradients of {listed(hidden)} held inf or NaN as backward left them"
        because += f": the loop put others in their place ({_changes(taken)}) before the scaler looked, so that it "
        yield Defect("skip", hidden[0], because + "neither leaves the step out nor lowers its scale")
    if taken.finite and not taken.overflowed and not taken.skipped and any(map(math.isnan, taken.losses)):
        yield Defect("inf or NaN", "", f"a loss of step {number} is NaN, and its gradients are finite")
    bad = [n for n, t in taken.after.items() if not bool(t.isfinite().all())]
    if bad and not taken.skipped:
        yield Defect("inf or NaN", bad[0], f"{listed(bad)} hold inf or NaN after step {number}")
    if taken.sum is not None:
        buffers = taken.sum.buffers_after
        before = taken.sum.first.buffers if taken.sum.first else {}
        was = {n: b for n, b in before.items() if _is_finite(b)}
        bad = [n for n, b in buffers.items() if n in was and b.is_floating_point() and not _is_finite(b)]
        if bad:
            yield Defect("inf or NaN", bad[0], f"the buffers {listed(bad)} hold inf or NaN {where}")
    if taken.sum is not None and look.steps.scaler is not None:
        for factor, op in taken.sum.factors():
            if not math.isfinite(factor):
                because = f"the loss is multiplied by {factor:g} {where} ({op.line}), where the loss scale is "
                because += f"{taken.scale:g}: {str(op.dtypes[0]).removeprefix('torch.')} does not hold that"
                yield Defect("loss scale", "", because)
    changed = moved(taken.before, taken.after)
    if taken.skipped:
        if changed:
            yield Defect("skip", changed[0], f"the scaler skipped step {number}, and the weights changed")
        return
    idle = [n for n in changed if n not in taken.given]
    if idle:
        yield Defect("unused parameter", idle[0], f"{listed(idle)} moved {where}, and had no gradient")
    if taken is next(each for each in look.taken if each.optimizer == taken.optimizer):
        yield from _counted(number, taken)
    yield from _lost_squares(number, taken)
    if taken.sum is None or not taken.finite:
        return
    yield from _handed_on(number, taken)


def _is_finite(buffer: Tensor) -> bool:
    """Returns whether all numbers are finite. Those that a sparse tensor leaves out are 0."""
    held = buffer if buffer.layout is torch.strided else buffer.to_sparse()._values()
    return bool(held.isfinite().all())


def _changes(taken: Taken) -> str:
    """Returns what was done to gradients after backward, and where."""
    parts = [f"{part} at {line}" for part, line in taken.order if part not in ("backward", "unscale", "norm")]
    return ", ".join(parts) or "nobody saw how"


def _counted(number: int, taken: Taken) -> Iterator[Defect]:
    """Yields updates that an optimizer has counted, but remembers nothing of."""
    counted = {n: s for n, s in taken.state.items() if n in taken.given and float(s.get("step", 0)) > 0}
    moments = [v for s in counted.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
    if moments and len(counted) == len(taken.given) and not any(bool(v.any()) for v in moments):
        count = max(float(s["step"]) for s in counted.values())
        because = f"before step {number} the optimizer has counted {count:g} updates, and remembers no gradient but 0: "
        yield Defect("bias correction", "", because + "its update is corrected as a later one")


def _lost_squares(number: int, taken: Taken) -> Iterator[Defect]:
    """Yields squares of gradients that became 0 in 16 bits, where the mean of the gradients is not 0."""
    shares: dict[str, float] = {}
    for name, state in taken.state_after.items():
        means, squares = (state.get(kind) for kind in ("exp_avg", "exp_avg_sq"))
        if means is not None and squares is not None and squares.dtype.itemsize == 2 and bool(means.any()):
            shares[name] = float((squares[means != 0] == 0).float().mean())
    if lost := [name for name, share in shares.items() if share > LOST]:
        because = f"up to {100 * max(shares.values()):.0f} % of the squares of gradients that the optimizer keeps of "
        because += f"{listed(lost)} are 0 after step {number}, and the gradients are not"
        yield Defect("moments", lost[0], because)


def _handed_on(number: int, taken: Taken) -> Iterator[Defect]:
    """Yields gradients that were rounded, lost or scaled between backward and the step."""
    found = handed_on(taken)
    where = f"in step {number}"
    if found.short:
        because = f"the gradients of {listed(found.short)} were rounded to 16 bits between backward and step {number}"
        yield Defect("gradient format", found.short[0], because)
    if math.isnan(found.factor):
        return
    if found.factor == 0 and not any(bool(g.any()) for g in taken.given.values()):
        because = f"backward makes gradients of norm {found.norm:.4g} {where}, and all that the optimizer gets is 0"
        yield Defect("gradient missing", "", because)
        return
    scales = set(taken.sum.scales) if taken.sum else set()
    if len(scales) == 1 and scales != {taken.scale} and found.one and math.isclose(found.factor, 1, rel_tol=SAME):
        because = f"the loss was multiplied by {scales.pop():g}, and its gradients are divided by {taken.scale:g} "
        yield Defect("gradient scaled", "", because + f"{where}: the loss scale was updated in between")
        return
    is_clip = found.one or any(clips(part) for part, _ in taken.order)
    tail_known = not any(root.hidden for root in taken.sum.roots) if taken.sum else False
    if found.scale != 1 and found.one and math.isclose(found.factor, found.scale, rel_tol=SAME):
        because = f"the optimizer gets gradients times the loss scale {taken.scale:g} {where}: nobody divided them "
        yield Defect("gradient scaled", "", because + "by it")
    elif found.scale != 1 and not taken.unscaled and found.factor > (1 + SAME if is_clip else _most_divided(taken)):
        because = f"the optimizer gets gradients times {short(found.factor)} {where}: they are "
        yield Defect("gradient scaled", "", because + f"{'clipped' if is_clip else 'changed'}, and still scaled")
    elif found.scale != 1 and math.isclose(found.factor * found.scale, 1, rel_tol=SAME):
        because = f"the gradients are divided by the loss scale {taken.scale:g} twice {where}"
        yield Defect("gradient scaled", "", because)
    cached = taken.scales_another and taken.sum is not None and taken.sum.has_weights  # gradients that are scaled
    if taken.unscaled and not taken.scaled and tail_known and taken.scale != 1 and not cached:
        because = f"the gradients are divided by the loss scale {taken.scale:g} {where}, and the loss was not "
        yield Defect("gradient scaled", "", because + "multiplied by it")
    adds = found.rest if found.scale != 1 and _adds_before_unscaling(taken) else ()
    if names := [n for n in adds if _has_weights_added(taken, n)]:
        because = f"the weights of {listed(names)}, times a decay, are added to their gradients {where} before these "
        because += f"are divided by the loss scale {taken.scale:g}: the decay is divided by it, too"
        yield Defect("weight decay", names[0], because)
    if names := found.still_scaled:
        because = f"the gradients of {listed(names)} are still multiplied by the loss scale {taken.scale:g} {where}, "
        yield Defect("gradient scaled", names[0], because + "and those of other parameters are not")
    others = [n for n in taken.clip.norms if n in taken.clip.scaled - taken.settings.keys()] if taken.clip else []
    if because := _clipped_with(others, taken, found):
        yield Defect("clip", others[0], f"{because} them {where}")
    if (usual := _clipped_scaled(taken, found)) is not None:
        because = f"the gradients are clipped to a norm of {usual:g} before they are divided by the loss scale "
        because += f"{found.scale:g} {where} ({found.before_unscale[0]}): what is left has a norm of "
        yield Defect("clip", "", because + f"{usual / found.scale:.3g}")
    if (most := _clamped_scaled(taken, found)) is not None:
        because = f"the gradients are clamped to {most:g} before they are divided by the loss scale {found.scale:g} "
        clamps = next(part for part in found.before_unscale if "clamp" in part)
        because += f"{where} ({clamps}): what is left is at most "
        yield Defect("clip", "", because + f"{most / found.scale:.3g}")


def _most_divided(taken: Taken) -> float:
    """Returns the largest factor of gradients that somebody may have divided by the loss scale, if no clip has changed
    them.

    Their factor is then that of the loop's own change. It is that factor times the loss scale if nobody divided them. A
    change is as likely to multiply as to divide. So both are equally likely at the square root of the scale.
    """
    return math.inf if _has_no_scale(taken) else max(math.sqrt(taken.scale), 1 + SAME)


def _has_no_scale(taken: Taken) -> bool:
    """Returns whether a loop makes signs of gradients, or gives all of them one norm."""
    given = [g[g != 0].abs().double() for g in taken.given.values()]
    norms = [float(each.norm()) for each in given if len(each)]
    is_normed = all(math.isclose(norm, norms[0], rel_tol=1e-3) for norm in norms)
    return is_normed or all(bool((each == each[:1]).all()) for each in given)


def _clipped_with(others: Sequence[str], taken: Taken, found: HandedOn) -> str:
    """Returns a clause on a norm to which torch's function clips, if it holds gradients of others that are still
    scaled: a scaler divides only the gradients of one optimizer by the loss scale. It is empty for any other norm."""
    clip = taken.clip
    if clip is None or not (others and taken.unscaled and found.scale != 1 and clip.asked[1] == 2 and found.one):
        return ""
    own = clip.norms.keys() & taken.settings.keys()
    rest, total = (clip.norm_of(names, 1.0) for names in (clip.norms.keys() - set(others), clip.norms))
    with_others, alone = (factor_of_norm(norm, clip.asked[0]) for norm in (total, rest))
    is_so = math.isclose(found.factor, with_others, rel_tol=1e-4) and not own <= clip.scaled
    if not is_so or math.isclose(with_others, alone, rel_tol=1e-4):
        return ""
    return (
        f"the norm to which gradients are clipped holds the gradients of {listed(others)}, which this optimizer does "
        f"not have and which are still multiplied by the loss scale {taken.scale:g}: the norm is {total:.4g}, and "
        f"{rest:.4g} without"
    )


def _adds_before_unscaling(taken: Taken) -> bool:
    """Returns whether something is added to gradients before they are divided by the loss scale, and nothing after."""
    parts = [part for part, _ in taken.order]
    at = parts.index("unscale") if "unscale" in parts else 0
    added = [any(word in part for word in ADDS) for part in parts]
    return any(added[:at]) and not any(added[at:]) and not any("copy" in part for part in parts[at:])


def _has_weights_added(taken: Taken, name: str) -> bool:
    """Returns whether a gradient is a factor of the raw one plus a factor of the weights."""
    raw, w, given = (t[name].double().flatten() for t in (taken.raw, taken.before, taken.given))
    w, left = (t - (t @ raw) / (raw @ raw) * raw for t in (w, given))  # what is across the raw gradient
    if not bool(w.any()):
        return False
    left -= (left @ w) / (w @ w) * w
    return len(given) > 2 and bool(left.norm() <= 8 * UNIT_ROUNDOFF * given.norm())


def _clipped_scaled(taken: Taken, found: HandedOn) -> float | None:
    """Returns the norm to which gradients were clipped while they were scaled; None if they were not, or if the user
    may have multiplied a norm by the scale. Factors tell of usual norms alone: the loop may have changed the gradients
    before, as by noise. Torch's function says what it was asked for."""
    if found.scale == 1 or not found.before_unscale:
        return None
    if found.one and found.factor < 1 - SAME:
        clipped = found.factor * (found.together * found.scale + 1e-6)
        if usual := [each for each in USUAL_NORMS if math.isclose(clipped, each, rel_tol=1e-4)]:
            return usual[0]
    norm, kind = taken.asked or (math.nan, 2.0)
    if kind != 2 or not math.isfinite(norm):
        return None
    is_meant = norm in USUAL_NORMS or _is_written(norm, found.scale)
    return norm if is_meant and math.isclose(taken.norm * found.scale, norm, rel_tol=1e-4) else None


def _clamped_scaled(taken: Taken, found: HandedOn) -> float | None:
    """Returns the number to which the loop clamped gradients while they were scaled; None where it did not, or where
    the user may have multiplied the number by the scale."""
    if found.scale == 1 or not taken.given or not any("clamp" in part for part in found.before_unscale):
        return None
    sizes = torch.cat([g.abs().flatten() for g in taken.given.values()])
    left = float(sizes.max())
    most = left * found.scale
    return most if int((sizes == left).sum()) > 1 and _is_written(most, found.scale) else None


def _is_written(value: float, scale: float) -> bool:
    """Returns whether a user wrote a number as it is, and did not divide it by the loss scale: 0.05 has few digits, and
    0.05 / 1024 has all digits of fp32. A number that is computed has all digits, too."""
    return digits_of(value) <= 3 and digits_of(value / scale) == 7


def _is_like(step: Taken, before: Taken) -> bool:
    """Returns whether a step is given the gradients of another step, which may have been clipped since. A loop may also
    set gradients by hand."""
    both = [n for n in step.given if n in before.given]
    if not both:
        return False
    one, other = (torch.cat([each.given[n].double().flatten() for n in both]) for each in (step, before))
    product = float(one @ other)
    return product != 0 and math.isclose(product * abs(product), float(one @ one) * float(other @ other), rel_tol=1e-6)


def of_skipped(taken: Sequence[Taken]) -> Iterator[Defect]:
    """Yields a defect if every step is skipped, and no loss scale mends it."""
    if len(taken) < 2 or not all(step.skipped for step in taken):
        return
    losses = [loss for step in taken for loss in step.losses]
    because = f"all {len(taken)} steps are skipped: "
    if losses and all(map(math.isnan, losses)):
        yield Defect("inf or NaN", "", because + "the loss is NaN before each, at any loss scale")
    elif taken[-1].scale < 1:
        because += f"gradients hold inf or NaN even at a loss scale of {taken[-1].scale:.3g}"
        yield Defect("inf or NaN", "", because)


def of_idle(look: Look) -> Iterator[Defect]:
    """Yields optimizers that get no gradient in any step and move nothing, though backward made gradients.

    A loop may mean that one of several optimizers waits, and hooks may use gradients and clear them. So an optimizer
    whose parameters backward left no gradient is a defect only where all of them are frozen and nothing else trains."""
    steps = [step for step in look.taken if not step.skipped]
    frozen = {n for n, p in look.params.items() if not p.requires_grad}
    active = {step.optimizer for step in steps if step.given or moved(step.before, step.after)}
    for name in dict.fromkeys(step.optimizer for step in steps if step.optimizer not in active):
        own = [step for step in steps if step.optimizer == name]
        norms = [math.hypot(*step.norms.values()) for step in own]
        of_it = f"the optimizer {name}" if len(look.attached.optimizers) > 1 else "the optimizer"
        made = [norm for norm in norms if math.isfinite(norm) and norm > 0]
        if made and len(own) > 1:  # a loop may leave out one update on purpose
            because = f"backward makes gradients of norm {made[0]:.4g}, and they are cleared before the step: "
            yield Defect("gradient missing", "", because + f"{of_it} gets none in {len(own)} steps")
        elif look.sums.backwards and not active and not look.attached.strangers and frozen.issuperset(own[-1].settings):
            yield Defect("gradient missing", "", f"{of_it} moves nothing: all of its parameters are frozen")


def of_repeats(taken: Sequence[Taken]) -> Iterator[Defect]:
    """Yields steps that use the gradients of the step before, and steps of a network left in evaluation mode."""
    for number, before, step in in_turn(taken):
        again = not before.skipped and not step.skipped
        same = not step.in_backward and (step.sum is None or step.sum is before.sum)
        if again and same and step.given and _is_like(step, before):
            because = f"step {number} updates with the gradients of step {number - 1} once more: no backward came "
            yield Defect("update again", "", because + "between")
    with_sums = [step for step in taken if step.sum is not None]
    modes = [(now, was.sum.training, now.sum.training) for _, was, now in in_turn(with_sums) if was.sum and now.sum]
    left = [step for step, was, now in modes if was and not now]
    if left and not any(now and not was for _, was, now in modes):
        number = next(number for number, step in enumerate(taken, start=1) if step is left[0])
        because = f"the network is in evaluation mode from step {number} on, and was in training mode before"
        yield Defect("state", "", because)
