"""Clipping: the norm that a backend says, and what it multiplied each gradient by."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mpcompare.verdict.judge.check import FP32, Check, Numbers
from mpcompare.verdict.reading import factor_of_norm

Seen = Mapping[str, Any]
ROUNDINGS = 8.0  # a norm: each square, the sums of the tensors', two roots, and the unscaling of what is summed


def clip_checks(mine: Numbers) -> Iterator[Check]:
    """Norm and factors of every update, beside those of the gradients that the backend shows."""
    for where in ("first", "overflow"):
        for number, clip in enumerate(mine.get(where, {}).get("clips", []), start=1):
            yield from _clip(f"update {number} of pass {where}", clip, _scales(mine.get(where, {})))


def _clip(name: str, clip: Numbers, scales: list[float]) -> Iterator[Check]:
    """One update's. Where only clipped gradients can be seen, the norm before is what the backend says, and the norm
    after must fit to it; whether it is right the gradients say, which are divided by the factor that it makes."""
    seen = "should_norm" in clip
    before = clip["should_norm"] if seen else clip["norm"]
    error, tiny = norm_error(clip)
    if seen:
        because = f"it says that the gradients' norm is {clip['norm']:.6g} in {name}, and it is {before:.6g}"
        because += _known_norm(clip["norm"] / before if before else 0.0, scales)
        yield Check(f"norm in {name}", abs(clip["norm"] - before), error * before + tiny, "clip", because)
    factor = clip["should_factor"] if seen else factor_of_norm(before, clip["clip_norm"])
    because = f"the norm of the clipped gradients is {clip['norm_after']:.6g} in {name}, where clipping makes "
    because += f"{factor * before:.6g} of {before:.6g}"
    difference, limit = abs(clip["norm_after"] - factor * before), (2 * error + 4 * FP32) * factor * before + tiny
    after = Check(f"norm of the clipped gradients in {name}", difference, limit, "clip", because)
    if not seen:
        yield after
        return
    why = _factors(clip, scales)
    for tensor, e in clip["factors"].items():
        because = f"clipping multiplies the gradient of {tensor} by {e['factor']:.6g} in {name}, where it should by "
        because += f"{factor:.6g}{why}"
        # The factor has the error of the norm, and is made, and multiplied with, in four more roundings; below 2^-126
        # products may become 0.
        limit = (error + tiny / before + 4 * FP32) * factor + math.sqrt(clip["elements"]) * 2.0**-126 / e["norm"]
        yield Check(f"clip factor of {tensor} in {name}", abs(e["factor"] - factor), limit, "clip", because)
        because = (
            f"clipping changes the direction of the gradient of {tensor} in {name}, by {e['rest']:.2g} of its norm"
        )
        yield Check(f"clipped gradient of {tensor} in {name}", e["rest"], limit, "clip", because)
    yield after


def norm_error(clip: Numbers) -> tuple[float, float]:
    """The relative error of a norm that fp32 sums, and the absolute one of squares below fp32's range, 2^-126 each.

    All squares are positive, so the error of their sum is like the root of its length (Higham and Mary, SIAM J. Sci.
    Comput. 41(5), 2019), whatever the order; the largest element has none.
    """
    if clip["norm_type"] == math.inf:
        return ROUNDINGS * FP32, 2.0**-126
    return (math.sqrt(clip["elements"]) + ROUNDINGS) * FP32, math.sqrt(clip["elements"]) * 2.0**-63


def _factors(clip: Numbers, scales: list[float]) -> str:
    """A clause that names the mistake behind the factors, if it is known."""
    clip_norm, norm, of = clip["clip_norm"], clip["should_norm"], clip["factors"].values()

    def makes(norms: list[float]) -> bool:
        expected = [factor_of_norm(n, clip_norm) for n in norms]
        return all(math.isclose(e["factor"], f, rel_tol=1e-3) for e, f in zip(of, expected, strict=True))

    if makes([0.0] * len(of)):
        return ": they are not clipped"
    if makes([e["norm"] for e in of]):
        return ": each tensor by its own norm"
    for scale in scales:
        if makes([norm * scale] * len(of)):
            return f": the norm is that of gradients times the loss scale {scale:g}"
        if makes([norm / scale] * len(of)):
            return f": the norm is that of gradients over the loss scale {scale:g}"
    if makes([sum(e["norm"] for e in of)] * len(of)):
        return ": the tensors' norms are added"
    return ""


def _known_norm(ratio: float, scales: list[float]) -> str:
    for scale in scales:
        if math.isclose(ratio, scale, rel_tol=1e-3):
            return f": that of gradients times the loss scale {scale:g}"
    return ""


def clip_mistake(factor: float, numbers: Seen, mine: Seen, theirs: Seen) -> str:
    """A clause, if gradients that are all ``factor`` times too large are so by clipping (1 % off at most: norms are
    known within the rounding errors of gradients): because the norm of scaled ones was clipped, or because ones that
    are said to be clipped, and were divided by their factor, are not."""
    clip_norm, found = numbers.get("clip_norm"), [e for e in theirs["gradients"].values() if e]
    if clip_norm is None:
        return ""
    largest = numbers["clip_norm_type"] == math.inf
    norm = max(e["largest"] for e in found) if largest else math.hypot(*(e["norm"] for e in found))
    for scale in _scales(mine):
        if factor < 0.99 and math.isclose(factor, clip_norm / (norm * scale + 1e-6), rel_tol=0.01):
            return f": clip_norm over their norm times the loss scale {scale:g}, clipped before they are unscaled"
    at_once = [clip for clip in mine.get("clips", []) if "should_norm" not in clip]
    if at_once and factor > 1.01 and math.isclose(factor, (at_once[0]["norm"] + 1e-6) / clip_norm, rel_tol=0.01):
        return f": their norm {at_once[0]['norm']:.6g} over clip_norm, they are not clipped"
    return ""


def _scales(found: Seen) -> list[float]:
    return sorted({step["loss_scale"] for step in found.get("steps", [])} - {1.0})
