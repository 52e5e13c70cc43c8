"""The exponents of activations, gradients and updates, counted: what would a format hold of them?"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mpcompare.contract import Batches
from mpcompare.tasks.optimizers import Optimizer
from mpcompare.tasks.task import Params, params_of
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.oracle import Exact, exact_step
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import Counts


def exponents_of(subject: Subject, exact: Exact, trained: nn.Module, batch: Batches) -> dict[str, Counts]:
    """Returns the counts of the first step (``first``) and of one after training (``last``), for whose exponents fp32
    is exact enough."""
    last = exact_step(trained, subject.task.loss_fn, batch, subject.precision, count=True, dtype=torch.float32)
    return {
        "first": {
            **exact.exponents,
            "updates": _updates(subject.task.optimizer, params_of(subject.model), exact.grads),
        },
        "last": {**last.exponents, "updates": _updates(subject.task.optimizer, params_of(trained), last.grads)},
    }


def _updates(optimizer: Optimizer, params: Params, grads: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Returns ``numerics.exponents`` of ``|first update| / |w|`` from these gradients, by parameter."""
    by_name = {}
    for name in grads:
        counts = []
        for w, g in numerics.chunks(params[name], grads[name]):
            w = w.double()
            update, _ = optimizer.replay().step(name, g.double(), w, optimizer.lr)
            no_weight = w == 0
            count = numerics.exponents(update.div_(w).masked_fill_(no_weight, 0))
            count[0] -= int(no_weight.sum())
            counts.append(count)
        by_name[name] = torch.stack(counts).sum(dim=0).tolist()
    return by_name
