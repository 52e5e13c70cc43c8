"""Parts of a batch: the weight of each part in the mean loss, and whether a batch can be computed in parts."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mpcompare.tasks.batch import Batch
from mpcompare.tasks.draws import state
from mpcompare.tasks.losses import Loss, shares


def shares_of(loss_fn: Loss, targets: Sequence[Batch]) -> list[float]:
    """Returns for each part of the targets the weight of its mean loss in the mean loss over all targets."""
    if parts := shares(loss_fn, targets, torch.float64):
        return [part.item() for part in parts]
    rows = sum(map(len, targets))
    return [len(y) / rows for y in targets]


def rows_are_independent(network: nn.Module, loss_fn: Loss, x: Batch, y: Batch) -> bool:
    """Returns whether the loss of a batch is the mean of its rows' losses, as far as eight rows in float64 tell. Batch
    norm couples the rows, and so do masks that are drawn for all rows at once."""

    def loss(rows: slice) -> Tensor:
        buffers = {name: b.clone() for name, b in network.named_buffers()}  # running statistics stay as they are
        return loss_fn(functional_call(network, buffers, (x[rows],)), y[rows])

    with torch.no_grad():
        before = state(x.device)
        whole = loss(slice(8))
        if state(x.device) != before:
            return False
        targets = [y[:4], y[4:8]]
        halves = [loss(slice(4)), loss(slice(4, 8))]
        mean = sum(share * half for share, half in zip(shares_of(loss_fn, targets), halves, strict=True))
    return bool((whole - mean).abs() <= 1e-10 * whole.abs())
