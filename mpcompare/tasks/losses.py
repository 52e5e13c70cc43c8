"""The losses that have a name. Any other is a callable of output and targets that returns a scalar.

A loss is a mean. Some losses leave labels out, so that the mean is over another number of labels in each micro-batch.
Such a loss has a ``count``, a function of the targets: the loss of a step is the mean over all labels of all its
micro-batches, and a micro-batch's part of the loss is its share of the labels (:func:`shares`). The mean of the
micro-batches' means would be another loss, in which a label counts more the fewer labels its micro-batch has.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Any, Any], Tensor]


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Returns the mean cross-entropy of logits ``[n, c]`` for classes ``[n]``, or of ``[n, t, c]`` for ``[n, t]``."""
    _check_classes("cross_entropy", output, y)
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def _check_classes(loss: str, output: Tensor, y: Tensor) -> None:
    if y.is_floating_point():
        raise TypeError(f"targets are real numbers, and {loss} takes classes")
    if output.shape[:-1] != y.shape:
        raise ValueError("expected the output's shape to be the targets' and one more for the classes")


class MaskedCrossEntropy:
    """The mean of :func:`cross_entropy` over the labels that are not -100, torch's ``ignore_index``; 0 where there is
    none."""

    ignored = -100

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        _check_classes("masked_cross_entropy", output, y)
        total = F.cross_entropy(output.flatten(0, -2), y.flatten(), ignore_index=self.ignored, reduction="sum")
        return total / self.count(y).clamp(min=1)

    def count(self, y: Tensor) -> Tensor:
        """Returns the number of labels that are not left out."""
        return (y != self.ignored).sum()


def mse(output: Tensor, y: Tensor) -> Tensor:
    """Returns the mean squared error over all elements of two tensors of one shape."""
    if not y.is_floating_point():
        raise TypeError("targets are classes, and mse takes real numbers")
    if output.shape != y.shape:
        raise ValueError("expected the output's shape to be the targets'")
    return F.mse_loss(output, y)


def of_model(output: Any, _: Any) -> Tensor:
    """Returns the loss that the network has computed itself, from labels among its inputs."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise ValueError("the output has no loss: are there labels among the inputs?")
    return cast(Tensor, loss)


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "masked_cross_entropy": MaskedCrossEntropy(),
    "mse": mse,
    "model": of_model,
}


def count_of(loss: Loss) -> Callable[[Tensor], Tensor] | None:
    """Returns the function that counts a loss's labels, also for a loss that ``functools.partial`` binds; None where
    all targets count alike."""
    return getattr(getattr(loss, "func", loss), "count", None)


def shares(loss: Loss, targets: Sequence[Any], dtype: torch.dtype = torch.float32) -> list[Tensor] | None:
    """Returns the shares of a step's micro-batches in its loss, 0-d tensors where the targets are; None where they are
    equal."""
    if (count := count_of(loss)) is None:
        return None
    counts = torch.stack([count(y).to(dtype) for y in targets])
    return list((counts / counts.sum().clamp(min=1)).unbind())
