"""Do norm and factor fit the gradients?

- *Value.* The norm that the backend reports, the factor of each gradient, whether its direction stays, and the norm
  after clipping.
- *Limit.* 2^-24 (sqrt(elements) + 8) of the norm, since all squares are positive; 4 roundings more for the factor.
"""

import math
from collections.abc import Sequence

from mpcompare.clipping import USUAL_NORMS, factor_of_norm
from mpcompare.verdict.judge.check import Case, Check, Checks, Examined
from mpcompare.verdict.judge.drive import Clip, Drive, Gradients
from mpcompare.verdict.judge.limits import FP32, stored_coarsely

ROUNDINGS = 8.0  # a norm: each square, the sums of the tensors', two roots, and the unscaling of what is summed


def checks(case: Case) -> Checks:
    """Yields checks of the norm and the factors of each clipped update. The right norm and the right factors follow
    from the shown gradients."""
    for where, drive in case.run.findings.drives.items():
        yield from of_pass(case.run, where, drive)


def of_pass(run: Examined, where: str, drive: Drive) -> Checks:
    """Yields the checks of one pass."""
    u = FP32 + stored_coarsely(run)  # gradients are stored as weights are
    for number, clip in enumerate(drive.clips, start=1):
        yield from _clip(f"update {number} of pass {where}", clip, scales(drive), u)


def _clip(name: str, clip: Clip, scales: Sequence[float], u: float) -> Checks:
    """Yields the checks of one update.

    Where only clipped gradients can be seen, the norm before is what the backend says, and the norm after must fit it.
    The gradients are divided by the factor that this norm makes, so they say whether the norm is right.
    """
    before = clip.norm if clip.should_norm is None else clip.should_norm
    error, tiny = norm_error(clip, u)
    if clip.should_norm is not None:
        because = f"it says that the gradients' norm is {clip.norm:.6g} in {name}, and it is {before:.6g}"
        known = [scale for scale in scales if math.isclose(clip.norm, scale * before, rel_tol=1e-3)]
        because += f": the norm of gradients times the loss scale {known[0]:g}" if known else ""
        yield Check(f"norm in {name}", abs(clip.norm - before), error * before + tiny, "clip", because)
    factor = factor_of_norm(before, clip.clip_norm) if clip.should_factor is None else clip.should_factor
    why = _factors(clip, scales) if clip.should_norm is not None else ""
    for tensor, e in clip.factors.items():
        because = f"clipping multiplies the gradient of {tensor} by {e.factor:.6g}, not by {factor:.6g}, in {name}{why}"
        # The factor has the error of the norm. Making it and multiplying by it takes four more roundings. Products
        # below 2^-126 may become 0.
        limit = (error + tiny / before + 4 * u) * factor + math.sqrt(clip.elements) * 2.0**-126 / e.norm
        yield Check(f"clip factor in {name}", abs(e.factor - factor), limit, "clip", because, tensor=tensor)
        because = f"clipping changes the direction of the gradient of {tensor} in {name}, by {e.rest:.2g} of its norm"
        yield Check(f"clipped gradient in {name}", e.rest, limit, "clip", because, tensor=tensor)
    because = f"the norm of the clipped gradients is {clip.norm_after:.6g} in {name}, where clipping makes "
    because += f"{factor * before:.6g} of {before:.6g}"
    difference, limit = abs(clip.norm_after - factor * before), (2 * error + 4 * u) * factor * before + tiny
    yield Check(f"norm of the clipped gradients in {name}", difference, limit, "clip", because)


def norm_error(clip: Clip, u: float = FP32) -> tuple[float, float]:
    """Returns the relative error of a norm that fp32 sums, and the absolute error of squares below fp32's range, 2^-126
    each. ``u`` is the unit roundoff of all that is stored.

    All squares are positive, so the error of their sum is like the root of its length (Higham and Mary, SIAM J. Sci.
    Comput. 41(5), 2019), whatever the order. The largest element has no such error.
    """
    if clip.norm_type == math.inf:
        return ROUNDINGS * u, 2.0**-126
    return math.sqrt(clip.elements) * FP32 + ROUNDINGS * u, math.sqrt(clip.elements) * 2.0**-63


def _factors(clip: Clip, scales: Sequence[float]) -> str:
    """Returns a clause that names the mistake behind the factors; empty if it is not known. A mistake clips each tensor
    by another norm."""
    norm, own = clip.should_norm or 0.0, [e.norm for e in clip.factors.values()]
    known = {"they are not clipped": [0.0] * len(own), "each tensor by its own norm": own}
    for scale in scales:
        known[f"the norm is taken of gradients times the loss scale {scale:g}"] = [norm * scale] * len(own)
        known[f"the norm is taken of gradients over the loss scale {scale:g}"] = [norm / scale] * len(own)
    known["the tensors' norms are added"] = [sum(own)] * len(own)
    for mistake, norms in known.items():
        pairs = zip(clip.factors.values(), norms, strict=True)
        if all(math.isclose(e.factor, factor_of_norm(n, clip.clip_norm), rel_tol=1e-3) for e, n in pairs):
            return f": {mistake}"
    return ""


def clip_mistake(factor: float, run: Examined, drive: Drive, step: Gradients) -> str:
    """Returns a clause, if clipping explains gradients that are all ``factor`` times too large (within 1 %: norms are
    known within the rounding errors of gradients). Three mistakes are known: scaled gradients were clipped; gradients
    that the backend says it clipped are not clipped; or gradients are clipped to a usual norm, and nobody asked to.
    The clause is empty for any other factor.

    Args:
        drive: the pass of the run, or the first one.
        step: the gradients of the run in that pass.
    """
    recipe, errors = run.findings.recipe, [e for e in step.gradients.values() if e]
    largest = recipe.clip_norm is not None and recipe.clip_norm_type == math.inf
    norm = max(e.largest for e in errors) if largest else math.hypot(*(e.norm for e in errors))
    if recipe.clip_norm is None:
        usual = min(USUAL_NORMS, key=lambda usual: abs(math.log(factor * norm / usual)))
        power = 2.0 ** round(math.log2(factor))  # gradients are multiplied by it on purpose, too: the nearer one counts
        off = abs(factor * norm / usual - 1)
        known = factor < 0.99 and off < 0.01 and off < abs(factor / power - 1)
        return f": their norm is {usual:g}, to which nobody asked to clip them" if known else ""
    for scale in scales(drive):
        if factor < 0.99 and math.isclose(factor, recipe.clip_norm / (norm * scale + 1e-6), rel_tol=0.01):
            return f": they are clipped before they are divided by the loss scale {scale:g}"
    if factor > 1.01 and math.isclose(factor, (norm + 1e-6) / recipe.clip_norm, rel_tol=0.01):
        return f": their norm {norm:.6g} over clip_norm, they are not clipped"
    return ""


def scales(drive: Drive) -> list[float]:
    """Returns the loss scales of the steps, but 1, and 0, by which nothing was multiplied or divided."""
    return sorted({step.loss_scale for step in drive.steps} - {0.0, 1.0})
