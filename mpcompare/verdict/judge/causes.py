"""From errors of gradients to their cause: which tensors are off, and how."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpcompare.verdict.judge.accumulation import wrong_sum
from mpcompare.verdict.judge.clipping import clip_mistake


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
    loss_is_right: bool,
) -> tuple[str, str]:
    """The cause, and a sentence that goes on after "in the first step"; empty where nothing failed.

    Args:
        errors: by tensor.
        numbers: of the run, ``numerics.json``: its ``layers`` say whose each tensor is.
        mine, theirs: of the pass, the run's and its reference's.
        loss_is_right: whether the loss of the pass is within its limit.
    """
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
    if "micro_batches" in mine:
        limit = math.hypot(*(e.limit for e in errors.values()))
        if because := wrong_sum(mine["micro_batches"], limit):
            return "accumulation", because
    if factor := _factor(errors):
        if mistake := clip_mistake(factor, numbers, mine, theirs):
            return "clip", f"every gradient is {factor:.4g} times what it should be{mistake}"
        known = _known(factor, numbers, mine)
        near = abs(factor - 1) < math.sqrt(numbers["unit_roundoff"])  # nobody scales by that on purpose
        if not known and near and 2 * len(failed) > len(errors):
            because = f"every gradient is {factor:.6g} times what it should be"
            return "loss", f"{because}: another loss (smoothed labels?), or a mean over another number"
        if known or (loss_is_right and not near):  # gradients of another loss may be nearly proportional
            return "gradient scaled", f"every gradient is {factor:.4g} times what it should be{known}"
        if math.isclose(mine["loss"], factor * mine["exact_loss"], rel_tol=numbers["unit_roundoff"]):
            return "loss", f"the loss and every gradient are {factor:.4g} times what they should be: a wrong mean"
    elif loss_is_right and (factor := _factor({name: errors[name] for name in failed})):
        return "gradient scaled", f"the gradients of {some} are {factor:.4g} times what they should be"
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
    layers = numbers["layers"]
    last = max((layers[name]["place"] for name in errors), default=-1)
    of_last = [name for name in errors if layers[name]["place"] == last]
    biases = [name for name in of_last if layers[name]["part"].startswith("bias")]
    roles = {role(layers[name]) for name in failed}
    if roles in ({"normalization"}, {"embedding"}):
        (only,) = roles
        return only, f"only gradients of {only} layers are wrong ({some}), {worst} is {off}"
    normed = {layer["after"] for layer in layers.values() if role(layer) == "normalization"}
    if all(layers[name]["layer"] in normed and errors[name].of["norm"] <= errors[name].limit for name in failed):
        return "normalization", f"the gradients of {some} are 0 before a norm, and it passes down something else"
    if all(layers[name]["part"].startswith("bias") for name in failed):
        return "bias sum", f"only bias gradients are wrong ({some}), {worst} is {off}: sums over the batch"
    if not any(errors[name].failed for name in of_last):
        return _inside(errors, layers, f"({some}), {worst} is {off}")
    if roles <= {""} and biases and not any(errors[name].failed for name in biases):
        return "products", f"wrong where matrices are multiplied ({some}), {worst} is {off}: sums in 16 bits?"
    still = [name for name, e in mine.get("buffers", {}).items() if e and e["zeros"] == 1]
    if still:
        because = f"gradients are wrong from the last layer on, and {', '.join(still)} did not move"
        return "normalization", f"{because}: statistics that are not the batch's?"
    furthest = max(errors[name].error / max(errors[name].of["norm"], 1e-300) for name in of_last)
    if furthest > math.sqrt(numbers["unit_roundoff"]):
        return "forward pass", f"wrong from the last layer on ({some}), by up to {furthest:.1e}: another function"
    return "loss", f"wrong from the loss's gradient on ({some}), {worst} is {off}: softmax, or the forward pass"


def role(layer: Mapping[str, Any]) -> str:
    """What a layer is there for, as far as its class or that of a module around it says so; else empty."""
    kind = layer["kind"]
    if "Embedding" in kind:
        return "embedding"
    if "Norm" in kind:
        return "normalization"
    if kind.removesuffix("Cell") in ("RNN", "LSTM", "GRU"):
        return "recurrent layer"
    return "attention" if any("Attention" in name for name in (kind, *layer["inside"])) else ""


def _inside(errors: Mapping[str, Errors], layers: Mapping[str, Any], what: str) -> tuple[str, str]:
    """The cause where the last layer is right: from which layer on is it wrong, and what stands just above?"""
    place = {layers[name]["layer"]: layers[name]["place"] for name in errors}
    wrong = {layers[name]["layer"] for name, e in errors.items() if e.failed}
    one = {layers[name]["layer"]: layers[name] for name in errors}  # of each layer one of its tensors
    top = max(wrong, key=place.__getitem__)
    right_above = [layer for layer in place if place[layer] > place[top] and layer not in wrong]
    above = min(right_above, key=place.__getitem__)
    if wrong == {top} and place[top] > min(place.values()):
        return role(one[top]) or "products", f"only {top} is wrong {what}"
    because = f"right in {above} and wrong from {top} on {what}"
    if role(one[top]) == "recurrent layer":
        return "recurrent layer", f"{because}: what is passed back in time, or down"
    if role(one[top]) == role(one[above]) == "attention" and _parent(top) == _parent(above):
        return "attention", f"{because}: what is passed through the attention"
    if role(one[above]) == "normalization" and one[above]["after"] == top:
        return "normalization", f"{because}: what the norm passes down"
    return "input gradient", f"{because}: what is passed down"


def _parent(layer: str) -> str:
    return layer.rpartition(".")[0]


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
