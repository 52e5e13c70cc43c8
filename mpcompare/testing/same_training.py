"""Two training loops that shall be the same: ``assert_same_training(ours, reference)``."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpcompare import generators
from mpcompare.verdict.examine.errors import UNIT_ROUNDOFF
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic
from mpcompare.verdict.examine.forced.formats import default_dtype
from mpcompare.verdict.examine.forced.kernels import Kernels
from mpcompare.verdict.examine.forced.random_numbers import Fed
from mpcompare.verdict.examine.forced.record import OUTPUT
from mpcompare.verdict.examine.numerics import distance, finite_norm, same_bits
from mpcompare.verdict.judge.check import listed
from mpcompare.watching import watch
from mpcompare.watching.derivatives import Derivatives
from mpcompare.watching.expecting import said
from mpcompare.watching.looking import Look
from mpcompare.watching.network_then import as_it_was, without_autocast
from mpcompare.watching.replaying import recorded_sum
from mpcompare.watching.steps import Sum

# Facts in which two loops that are the same agree.
COMPARED = (
    "precision", "masters", "moments", "micro_batches", "clip_norm", "gradients_times", "factors", "optimizer",
    "without_gradient", "loss_scale", "scales", "skipped", "training_mode",
)  # fmt: skip
Trains = Callable[[Callable[..., Any]], object]


class DifferentTraining(AssertionError):  # noqa: N818 - said as it is
    """Two loops train differently, or one of them is wrong; a line for each reason."""


def assert_same_training(ours: Trains, reference: Trains, steps: int = 3) -> None:
    """Asserts that two loops train alike, within the roundings of their precision. There is no tolerance to choose.

        def ours(watch):
            model, optimizer, batches = make(seed=0)
            with watch(model, optimizer):
                our_trainer(model, optimizer, batches)

    In each loop by itself the gradients, layer by layer, and the updates must be right. And both must begin with the
    same weights, do the same (the precision, the micro-batches, clipping, the optimizer and its settings, the loss
    scale), and have the same gradients. The gradients are computed in float64 from the weights and the inputs that each
    loop had, and may differ by what fp32 cannot tell apart. So a rounding of one loop is never taken for a difference,
    and a difference never for a rounding.

    Args:
        ours, reference: each makes a network and trains it within the ``watch`` that it is given; both networks are
            made in the same way, with parameters of the same names. A loop that trains several networks may open a
            block for each, in the same order.
        steps: the number of updates that are compared.

    Raises:
        DifferentTraining: a line says what is different.
    """
    ours_seen, reference_seen = _seen("ours", ours, steps), _seen("the reference", reference, steps)
    if len(ours_seen) != len(reference_seen):
        raise DifferentTraining(f"ours opened {len(ours_seen)} blocks, the reference {len(reference_seen)}")
    lines = []
    for number, (one, other) in enumerate(zip(ours_seen, reference_seen, strict=True), start=1):
        where = f"block {number}: " if len(ours_seen) > 1 else ""
        lines += [where + line for line in _different(one, other)]
    if lines:
        raise DifferentTraining("\n  ".join(["the training is not the same:", *lines]))


def _seen(name: str, loop: Trains, steps: int) -> list[Any]:
    """Returns what was seen in each block that the loop opened."""
    found: list[Any] = []

    def watching(model: Any, optimizer: Any) -> Any:
        found.append(watch(model, optimizer, steps=steps))
        return found[-1]

    loop(watching)
    count = min((one.facts.get("updates", 0) for one in found), default=0)
    if count < steps:
        raise DifferentTraining(f"{name} took {count} updates within the block that it was given, expected {steps}")
    return found


def _different(ours: Any, reference: Any) -> list[str]:
    """Returns what is wrong in one of two blocks, or different between them."""
    seen = {"ours": ours, "reference": reference}
    lines = [f"{name}: {defect}" for name, one in seen.items() for defect in one.defects]
    lines += [f"{name}: not examined: {each}" for name, one in seen.items() for each in one.not_examined]
    for fact in COMPARED:
        a, b = ours.facts.get(fact), reference.facts.get(fact)
        if a != b:
            lines.append(f"{fact} is {said(a)} in ours, {said(b)} in the reference")
    lines += _groups(ours.facts["groups"], reference.facts["groups"])
    return lines or _steps(ours, reference)


def _groups(ours: list[Mapping[str, Any]], reference: list[Mapping[str, Any]]) -> list[str]:
    """Returns the settings of parameter groups that are different."""
    if len(ours) != len(reference):
        return [f"ours has {len(ours)} parameter groups, the reference {len(reference)}"]
    return [
        f"{key} of parameter group {number} is {said(a.get(key, 'the default'))} in ours, "
        f"{said(b.get(key, 'the default'))} in the reference"
        for number, (a, b) in enumerate(zip(ours, reference, strict=True), start=1)
        for key in {**a, **b}
        if a.get(key) != b.get(key)
    ]


def _steps(ours: Any, reference: Any) -> list[str]:
    """Returns what is different in the first weights and in the exact gradients of each update."""
    looks = [one.look for one in (ours, reference)]
    first = [look.taken[0].sum.weights for look in looks]
    if first[0].keys() != first[1].keys():
        return [f"the parameters have other names: {listed(sorted(first[0].keys() ^ first[1].keys()))}"]
    if wrong := [n for n in first[0] if not same_bits(first[0][n], first[1][n])]:
        return [f"the first weights of {listed(wrong)} are others"]
    steps = zip(*([t for t in look.taken if not t.skipped] for look in looks), strict=False)
    for number, (a, b) in enumerate(steps, start=1):
        # Later weights differ by the roundings of each loop: both gradients are taken at the reference's weights.
        mine, theirs = (_exact_gradients(look, step.sum, b.sum) for look, step in zip(looks, (a, b), strict=True))
        least = UNIT_ROUNDOFF * finite_norm(theirs)  # a tensor with a smaller norm is float64's own rounding
        wrong = [n for n in theirs if not _close(mine.get(n), theirs[n], least)] + [n for n in mine if n not in theirs]
        if wrong:
            return [f"the gradients of {listed(wrong)} are others in update {number}"]
    return []


def _exact_gradients(look: Look, seen: Sum, at: Sum) -> dict[str, Tensor]:
    """Returns the gradients of a sum: the loop's own computation in float64, from the inputs of the network on. Of its
    record only the random numbers that the network drew are used.

    Args:
        at: the sum with the weights and buffers at which the gradients are taken.
    """
    if seen.first is None or at.first is None:
        return {}
    seen, device = look.sums.spool.back(seen), next(look.network.parameters()).device
    network = as_it_was(look.network, seen, at).double()
    replay = recorded_sum(seen, network, Derivatives(), Kernels()).new_replay(Arithmetic(torch.float64))
    kept = generators.kept(device), torch.enable_grad(), without_autocast()
    with kept[0], kept[1], kept[2], replay.weights, Fed(seen.record.drawn), default_dtype(torch.float64):
        replay.take(seen.record.calls[OUTPUT])
    found: dict[str, Tensor] = {}
    for name, p in network.named_parameters():
        parts = [t.grad for t in (p, replay.weights.between.get(name)) if t is not None and t.grad is not None]
        if parts:
            found[name] = sum(parts[1:], parts[0])
    return found


def _close(mine: Tensor | None, theirs: Tensor, least: float) -> bool:
    if mine is None or mine.shape != theirs.shape or not bool(torch.isfinite(mine).all()):
        return False
    return distance({"": mine}, {"": theirs}) <= UNIT_ROUNDOFF * (finite_norm({"": theirs}) + least)
