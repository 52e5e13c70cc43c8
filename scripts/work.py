"""The least work of a step: arithmetic and memory traffic of each operation and phase, from shapes alone.

Each input counts as read once and each output as written once, whatever a cache could save or an implementation
repeats. So these counts over a measured time are an achieved rate. The larger of flops / (flop/s) and bytes / (byte/s)
is the least time.
"""

from dataclasses import dataclass
from itertools import pairwise

from mpcompare.precision import PRECISIONS
from mpcompare.tasks.mlp import PlainMlp
from mpcompare.tasks.optimizers import Sgd


@dataclass(frozen=True)
class Work:
    """Floating point operations, and bytes that go to and from memory."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Floating point operations a byte."""
        return self.flops / self.bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def gemm(M: int, K: int, N: int, size: int) -> Work:
    """Returns the work of ``[M, K] [K, N] -> [M, N]``, with elements of ``size`` bytes."""
    return Work(2 * M * K * N, size * (M * K + K * N + M * N))


def linear(n: int, fan_in: int, fan_out: int, size: int) -> Work:
    """Returns the work of ``relu(x W + b)``: ``[n, in] [in, out] -> [n, out]``."""
    return gemm(n, fan_in, fan_out, size) + Work(2 * n * fan_out, size * fan_out)


def linear_backward(n: int, fan_in: int, fan_out: int, size: int) -> Work:
    """Returns the work of ``dW = z^T da``, then ``da W^T`` where ``z > 0`` in place of ``z``, and its column sums."""
    products = 4 * n * fan_in * fan_out
    read_once = n * fan_out + fan_in * fan_out + n * fan_in
    written = fan_in * fan_out + n * fan_in + fan_in
    return Work(products + n * fan_in, size * (read_once + written))


def cross_entropy(n: int, classes: int, size: int) -> Work:
    """Returns the work of softmax, loss and gradient: max, subtract, exp, sum, scale of each logit; classes are
    int64."""
    return Work(5 * n * classes, 2 * size * n * classes + 8 * n)


def sgd(params: int, size: int, momentum: bool = False) -> Work:
    """Returns the work of ``master -= lr g / scale``, with fp32 masters and gradients of ``size`` bytes."""
    return Work((5 if momentum else 3) * params, (8 + size + (8 if momentum else 0)) * params)


def adam(params: int, size: int) -> Work:
    """Returns the work of an update by Adam, with both moments; each multiplication, division, sum and root counts as
    one."""
    return Work(15 * params, (24 + size) * params)


def phases(task: PlainMlp, precision: str) -> dict[str, Work]:
    """Returns the work of the phases of a step. Tensors that one phase hands to another go through memory, tensors that
    a phase makes and uses up do not.

    The phases from unscale to update are one here, because backends divide the way from 16-bit gradients to new weights
    between them differently.
    """
    n, size = task.rows * task.accumulate, PRECISIONS[precision].storage.bytes
    weights = [fan_in * fan_out for fan_in, fan_out in pairwise(task.sizes)]
    params, hidden = sum(weights) + sum(task.sizes[1:]), n * sum(task.sizes[1:-1])
    inputs, outputs = n * task.in_features, n * task.out_features
    targets = 8 * n if task.loss == "cross_entropy" else 4 * outputs
    products = 2 * n * sum(weights)
    after_first = params - weights[0] - task.sizes[1]
    repeated = task.accumulate * size  # parameters and gradients go through memory once a micro-batch
    sums = Work(task.accumulate * params, (8 + size) * task.accumulate * params) if task.accumulate > 1 else Work(0, 0)
    if isinstance(task.optimizer, Sgd):
        update = sgd(params, size if task.accumulate == 1 else 4, task.optimizer.momentum > 0)
    else:
        update = adam(params, size if task.accumulate == 1 else 4)
    return {
        # x fp32, y, params -> z_1 .. z_{L-1}, logits, the fp32 loss
        "forward": Work(products, 4 * inputs + targets + size * (hidden + outputs) + repeated * params + 4),
        # z_0 .. z_{L-1}, logits, W_2 .. W_L -> dW, db
        "backward": Work(
            2 * products - 2 * n * weights[0], size * (inputs + hidden + outputs) + repeated * (after_first + params)
        )
        + sums,
        "unscale to update": update,
    }


def step(task: PlainMlp, precision: str) -> Work:
    """Returns the work of a whole step, the sum over its phases."""
    return sum(phases(task, precision).values(), Work(0, 0))
