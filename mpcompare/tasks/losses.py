"""The losses that have a name. Any other is a callable of output and targets that returns a scalar."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Returns the mean cross-entropy of logits ``[n, c]`` for classes ``[n]``, or of ``[n, t, c]`` for ``[n, t]``."""
    if y.is_floating_point():
        raise TypeError("targets are real numbers, and cross_entropy takes classes")
    if output.shape[:-1] != y.shape:
        raise ValueError("expected the output's shape to be the targets' and one more for the classes")
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def mse(output: Tensor, y: Tensor) -> Tensor:
    """Returns the mean squared error over all elements of two tensors of one shape."""
    if not y.is_floating_point():
        raise TypeError("targets are classes, and mse takes real numbers")
    if output.shape != y.shape:
        raise ValueError("expected the output's shape to be the targets'")
    return F.mse_loss(output, y)


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mse}
