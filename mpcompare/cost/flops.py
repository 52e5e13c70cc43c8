"""The arithmetic of a training step of any module, counted by torch on tensors without memory."""

import copy

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mpcompare.tasks.losses import Loss


def step_flops(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> int | None:
    """Floating point operations of the products (linear, convolution, recurrence, attention) of forward and backward of
    a batch: a product of M x K by K x N is 2 M N K. None where the module cannot run without memory."""
    try:
        network = copy.deepcopy(model).to("meta")
        with FlopCounterMode(display=False) as counter:
            loss_fn(network(x.to("meta")), y.to("meta")).backward()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return counter.get_total_flops()
