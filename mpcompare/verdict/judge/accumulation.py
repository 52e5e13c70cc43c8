"""Gradients that are another sum of the micro-batches' gradients than their mean, or than the mean over all labels."""

import math
from dataclasses import dataclass

SKETCHED = 1.05  # the distance of two sketches is the distance of their tensors, within 5 %


@dataclass(frozen=True)
class MicroBatches:
    """The weight of each micro-batch in the gradients, by least squares."""

    counts: list[float]  # a number for each micro-batch, 1 if the gradients are right
    rest: float  # the norm of the part of the gradients that no counts explain, within 5 %
    # smallest singular value of the micro-batches' gradients: an error ``e`` of the gradients makes an error of at most
    # ``e / smallest`` in the counts
    smallest: float
    weights: list[float]  # parts of the loss, times their number: 1 unless labels are counted


def wrong_sum(batches: MicroBatches, limit: float) -> str:
    """Returns a sentence that says how often the micro-batches count. The sentence is empty if all of them may count
    alike, and no known mistake makes them count so often.

    Args:
        limit: the limit of the error of all gradients together. A remainder of this size is no reason to doubt the
            counts. An error of this size in the gradients makes an error of ``limit / smallest`` in the counts.
    """
    counts, every = batches.counts, len(batches.counts)
    error = SKETCHED * limit / batches.smallest if batches.smallest else math.inf
    mean = sum(counts) / every
    scale = max(1.0, abs(mean))  # errors are scaled with their gradients
    if not (math.isfinite(mean) and batches.rest <= SKETCHED * scale * limit):
        return ""
    alike = [1 / weight if weight else math.nan for weight in batches.weights]
    if any(abs(other - 1) > 2 * error for other in alike) and all(
        abs(count - other) <= max(other, 1.0) * error for count, other in zip(counts, alike, strict=True)
    ):
        labels = ", ".join(f"{weight / every:.2g}" for weight in batches.weights)
        return f"the micro-batches count alike, where their shares of the labels are {labels}: a mean of means"
    if max(counts) - min(counts) > 2 * scale * error:
        once = [str(at) for at, count in enumerate(counts, start=1) if abs(count - 1) <= scale * error]
        if len(once) + sum(abs(count) <= scale * error for count in counts) == every:
            return f"of {every} micro-batches only {', '.join(once)} counts" if once else "no micro-batch counts"
        return f"the micro-batches count {', '.join(f'{count:.2g}' for count in counts)} times, where each counts once"
    for times, why in ((every, "the loss is not divided by task.accumulate"), (1 / every, "divided by it twice")):
        if abs(mean - times) <= max(times, 1.0) * error + 0.01 * times:
            return f"every micro-batch counts {mean:.3g} times: {why}"
    return ""
