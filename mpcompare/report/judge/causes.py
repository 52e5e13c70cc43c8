"""From errors of gradients to their cause: which tensors are off, and how."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Errors:
    """Of one tensor's gradient: ``numerics.gradient_errors``, empty if it is missing, and the limit for its error."""

    of: Mapping[str, Any]
    limit: float

    @property
    def error(self) -> float:
        return self.of["error"] if self.of else math.inf

    @property
    def failed(self) -> bool:
        return not self.error <= self.limit


def explain(
    errors: Mapping[str, Errors],
    numbers: Mapping[str, Any],
    mine: Mapping[str, Any],
    theirs: Mapping[str, Any],
) -> tuple[str, str]:
    """The cause, and a sentence that goes on after "in the first step"; empty where nothing failed."""
    failed = [name for name, e in errors.items() if e.failed]
    if not failed:
        return "", ""
    worst = max(failed, key=lambda name: errors[name].error / max(errors[name].limit, 1e-300))
    some = ", ".join(failed)
    for name in failed:
        e = errors[name].of
        if not e or e["zeros"] == 1:
            return "gradient missing", f"{name} has no gradient"
        if not math.isfinite(e["error"]):
            return "overflow", f"the gradient of {name} holds inf or NaN"
    if factor := _factor(errors):
        return (
            "gradient scaled",
            f"every gradient is {factor:.4g} times what it should be{_known(factor, numbers, mine)}",
        )
    for name in failed:
        if errors[name].of.get("transposed", math.inf) <= errors[name].limit:
            return "gradient transposed", f"the gradient of {name} is transposed"
    zeros = max(failed, key=lambda name: errors[name].of["zeros"])
    share, small = errors[zeros].of["zeros"], too_small(numbers, mine, theirs)
    if _is_fp16(numbers) and share > 0.001:
        return "underflow", f"{100 * share:.2g} % of the gradient of {zeros} is 0 and should not be{small}"
    off = f"off by {errors[worst].error / max(errors[worst].of['norm'], 1e-300):.1e} of its norm"
    if small:
        return "underflow", f"{worst} is {off}{small}"
    last = max(int(name[1:]) for name in errors)
    if all(name[0] == "b" for name in failed):
        return "bias sum", f"only bias gradients are wrong ({some}), {worst} is {off}: sums over the batch"
    if not (errors[f"W{last}"].failed or errors[f"b{last}"].failed):
        return "input gradient", f"right in layer {last} and wrong below ({some}), {worst} is {off}: relu's mask, or dz"
    if not errors[f"b{last}"].failed:
        return "products", f"wrong where matrices are multiplied ({some}), {worst} is {off}: sums in 16 bits?"
    return "loss", f"wrong from the loss's gradient on ({some}), {worst} is {off}: softmax, or the forward pass"


def too_small(numbers: Mapping[str, Any], mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """A clause that goes on after another, if fp16 holds most of the activations' gradients with less than its digits,
    and far fewer of the reference's, whose loss scale is larger."""
    share, of_reference = (found.get("subnormal", 0.0) for found in (mine, theirs))
    if not _is_fp16(numbers) or share <= max(0.5, 2 * of_reference):
        return ""
    scale = next(step["loss_scale"] for step in mine["steps"] if step["finite"])
    return (
        f": at loss scale {scale:g}, {100 * share:.3g} % of the activations' gradients are subnormal in fp16, "
        f"of the reference's {100 * of_reference:.2g} %"
    )


def _is_fp16(numbers: Mapping[str, Any]) -> bool:
    """The one precision that underflows where fp32 does not."""
    return bool(numbers["unit_roundoff"] == 2.0**-11)


def _factor(errors: Mapping[str, Errors]) -> float | None:
    """The one factor by which every gradient is off, if that is all."""
    found = [e for e in errors.values() if e.of and e.of["norm"]]
    slopes = [e.of["slope"] for e in found]
    if not slopes or min(slopes) <= 0 or not any(e.failed for e in found):
        return None
    alone = all(e.of["residual"] <= max(1, slope) * e.limit for e, slope in zip(found, slopes, strict=True))
    spread = all(
        abs(s / slopes[0] - 1) <= 2 * (e.limit / e.of["norm"]) + 1e-6 for s, e in zip(slopes, found, strict=True)
    )
    return slopes[0] if alone and spread else None


def _known(factor: float, numbers: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Numbers that gradients are multiplied by, by mistake."""
    scales = {step["loss_scale"] for step in mine.get("steps", [])} - {1.0}
    known = {f"the loss scale {scale:g}": scale for scale in scales} | {"the batch size": numbers["batch_size"]}
    for name, value in known.items():
        if math.isclose(factor, value, rel_tol=0.01):
            return f": {name}"
        if math.isclose(factor, 1 / value, rel_tol=0.01):
            return f": 1 / {name}"
    return ""
