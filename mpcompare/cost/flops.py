"""The arithmetic of a training step of any module, counted by torch on tensors without memory."""

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.losses import Loss


def step_flops(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> int | None:
    """Returns the floating point operations of the matrix products (linear, convolution, recurrence, attention) in
    forward and backward of a batch, or None where the module cannot run on tensors without memory. A product of M x K
    by K x N has 2 M N K."""
    try:
        network = copy_of(model).to("meta")
        with FlopCounterMode(display=False) as counter:
            loss_fn(network(x.to("meta")), y.to("meta")).backward()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return counter.get_total_flops()
