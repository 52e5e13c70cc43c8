"""The parts that memory models of an MLP's step share. Names and shapes are as in :mod:`mpcompare.tasks.mlp`."""

from collections.abc import Callable
from itertools import pairwise

import torch

from mpcompare.contract import MemoryModel
from mpcompare.cost import Ledger
from mpcompare.tasks.groups import in_group
from mpcompare.tasks.mlp import PlainMlp
from mpcompare.tasks.optimizers import AdamW, Sgd

PeakOf = Callable[[PlainMlp, str], MemoryModel]  # the tensors at the peak, for an MLP and a precision


def ledger_with_inputs(task: PlainMlp) -> Ledger:
    """Returns a ledger that holds a batch, all of its micro-batches: fp32 inputs, and int64 classes or fp32 targets."""
    ledger = Ledger()
    rows = task.rows * task.accumulate
    ledger.alloc("inputs", "x", rows * task.in_features, 4)
    if task.loss == "cross_entropy":
        ledger.alloc("inputs", "y", rows, 8)
    else:
        ledger.alloc("inputs", "y", rows * task.out_features, 4)
    return ledger


def ledger_before_a_step(task: PlainMlp, itemsize: int = 4) -> Ledger:
    """Returns a ledger that holds all that is live before a step: the batch, the master parameters and the optimizer's
    state, the last two with ``itemsize`` bytes an element. With accumulation it also holds the fp32 sums of the
    micro-batches' gradients: the sums are live from the first micro-batch on, and the peak is in a later one.
    """
    ledger = ledger_with_inputs(task)
    for layer in range(1, len(task.sizes)):
        alloc_both(ledger, "master params", "master {}", task, layer, itemsize)
        for kind in state_kinds(task):
            alloc_both(ledger, "optimizer state", f"{kind} {{}}", task, layer, itemsize)
    for layer in range(1, len(task.sizes) if task.accumulate > 1 else 1):
        alloc_both(ledger, "gradients", "sum of d{}", task, layer, 4)
    return ledger


def alloc_both(ledger: Ledger, kind: str, name: str, task: PlainMlp, layer: int, itemsize: int) -> None:
    """Adds two tensors, of the shapes of a layer's weight and bias; ``name`` has ``{}`` for ``W1`` and ``b1``."""
    fan_in, fan_out = task.sizes[layer - 1 : layer + 1]
    ledger.alloc(kind, name.format(f"W{layer}"), fan_in * fan_out, itemsize)
    ledger.alloc(kind, name.format(f"b{layer}"), fan_out, itemsize)


def state_kinds(task: PlainMlp) -> list[str]:
    """Returns the names of the tensors that the optimizer keeps of each parameter, in the parameter's shape."""
    return [kind for kind, value in task.optimizer.initial_state(torch.empty(1)).items() if value.dim()]


def alloc_update(ledger: Ledger, task: PlainMlp, adam_temporaries: int) -> None:
    """Adds the fp32 temporaries of the largest weight's update; torch updates tensor by tensor.

    ``adam_temporaries``: the number of tensors of the weight's size that Adam has at a time.
    """
    largest, layer = max((fan_in * fan_out, n) for n, (fan_in, fan_out) in enumerate(pairwise(task.sizes), start=1))
    optimizer, _ = in_group(task.optimizer, task.names[f"W{layer}"], 2)
    if not isinstance(optimizer, AdamW) and optimizer.weight_decay:
        ledger.alloc("gradients", "gradient and decay", largest, 4)
    if isinstance(optimizer, Sgd):
        if optimizer.nesterov:
            ledger.alloc("optimizer state", "nesterov's sum", largest, 4)
        return
    for number in range(adam_temporaries):
        ledger.alloc("optimizer state", f"sqrt(v), {number + 1}", largest, 4)
