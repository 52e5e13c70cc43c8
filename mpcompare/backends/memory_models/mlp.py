"""The parts that the memory models of an MLP's step share."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from mpcompare.contract import BackendUnavailable, MemoryModel
from mpcompare.cost.memory import Ledger
from mpcompare.tasks.mlp import PlainMlp, plain_mlp
from mpcompare.tasks.optimizers import AdamW, Sgd
from mpcompare.tasks.task import Task


def of_mlp(
    model_of: Callable[[PlainMlp, str], MemoryModel], model: nn.Module, task: Task, precision: str
) -> MemoryModel:
    """``model_of`` where the task is a plain MLP; nothing for other networks, which are measured only."""
    try:
        return model_of(plain_mlp(model, task), precision)
    except BackendUnavailable:
        return {}


def inputs(task: PlainMlp) -> Ledger:
    ledger = Ledger()
    rows = task.rows * task.accumulate
    ledger.alloc("inputs", "x", rows * task.in_features, 4)
    if task.loss == "cross_entropy":
        ledger.alloc("inputs", "y", rows, 8)
    else:
        ledger.alloc("inputs", "y", rows * task.out_features, 4)
    return ledger


def inputs_and_masters(task: PlainMlp, itemsize: int = 4) -> Ledger:
    ledger = inputs(task)
    for layer, (fan_in, fan_out) in enumerate(pairwise(task.sizes), start=1):
        ledger.alloc("master params", f"master W{layer}", fan_in * fan_out, itemsize)
        ledger.alloc("master params", f"master b{layer}", fan_out, itemsize)
        for kind in remembered(task):
            ledger.alloc("optimizer state", f"{kind} W{layer}", fan_in * fan_out, itemsize)
            ledger.alloc("optimizer state", f"{kind} b{layer}", fan_out, itemsize)
    return ledger


def remembered(task: PlainMlp) -> list[str]:
    """What the optimizer keeps of each parameter, a number for every element."""
    return [kind for kind, value in task.optimizer.initial_state(torch.empty(1)).items() if value.dim()]


def alloc_sums(m: Ledger, task: PlainMlp) -> None:
    """The fp32 sums of the gradients of earlier micro-batches."""
    for layer, (fan_in, fan_out) in enumerate(pairwise(task.sizes), start=1):
        m.alloc("gradients", f"sum of dW{layer}", fan_in * fan_out, 4)
        m.alloc("gradients", f"sum of db{layer}", fan_out, 4)


def alloc_update(m: Ledger, task: PlainMlp, adam_temporaries: int) -> None:
    """What comes and goes while the largest weight is updated, tensor by tensor."""
    rule, largest = task.optimizer, max(fan_in * fan_out for fan_in, fan_out in pairwise(task.sizes))
    if not isinstance(rule, AdamW) and rule.weight_decay:
        m.alloc("gradients", "gradient and decay", largest, 4)
    if isinstance(rule, Sgd):
        if rule.nesterov:
            m.alloc("optimizer state", "nesterov's sum", largest, 4)
        return
    for number in range(adam_temporaries):
        m.alloc("optimizer state", f"sqrt(v), {number + 1}", largest, 4)
