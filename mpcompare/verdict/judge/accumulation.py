"""Gradients that are another sum of the micro-batches' gradients than their mean."""

import math
from collections.abc import Mapping
from typing import Any

SKETCHED = 1.05  # distances of sketches are those of tensors within 5 %


def wrong_sum(found: Mapping[str, Any], limit: float) -> str:
    """How often the micro-batches count, in a sentence; empty where nothing tells that they do not count alike, or
    where they do, and count as often as a known mistake makes them.

    Args:
        found: ``numerics.shares_of``.
        limit: of the error of all gradients together. So large a remainder is no reason to doubt the counts, and so
            large an error of the gradients is one of ``limit / smallest`` in them.
    """
    counts, every = found["counts"], len(found["counts"])
    error = SKETCHED * limit / found["smallest"] if found["smallest"] else math.inf
    mean = sum(counts) / every
    scale = max(1.0, abs(mean))  # of gradients that are scaled, errors are, too
    if not (math.isfinite(mean) and found["rest"] <= SKETCHED * scale * limit):
        return ""
    if max(counts) - min(counts) > 2 * scale * error:
        return f"the micro-batches count {', '.join(f'{count:.2g}' for count in counts)} times, where each counts once"
    for times, why in ((every, "the loss is not divided by task.accumulate"), (1 / every, "divided by it twice")):
        if abs(mean - times) <= max(times, 1.0) * error + 0.01 * times:
            return f"every micro-batch counts {mean:.3g} times: {why}"
    return ""
