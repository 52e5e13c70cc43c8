"""The analytic memory model: which tensors must be live at the peak of a step, by kind, name and size in bytes.

A step is replayed as the sequence of its allocations and frees; the peak is the fullest moment. It counts what the
framework's allocator hands out. What a matrix product computes in is its library's choice, so it is measured: on a GPU
cuBLAS has it from the same allocator, and it joins the model as the kind "workspace" (train.py); packing buffers of a
CPU GEMM lie outside and stand beside it.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from mpcompare.contract import BackendUnavailable, MemoryModel
from mpcompare.native import flat
from mpcompare.precision import FORMATS, PRECISIONS
from mpcompare.tasks.mlp import PlainMlp, plain_mlp
from mpcompare.tasks.optimizers import AdamW, Sgd
from mpcompare.tasks.task import Task

# In the order of a figure: what a step finds, what it keeps for the next, what comes and goes in it.
TENSOR_KINDS = (
    "inputs",
    "master params",
    "optimizer state",
    "compute copies",  # 16-bit weights that a backend keeps for itself
    "cast cache",  # 16-bit weights that autocast keeps
    "activations",  # the 16-bit copy of the inputs among them
    "gradients",  # of activations and of weights
    "workspace",  # of cuBLAS, on a GPU
)


def allocated_bytes(model: MemoryModel) -> int:
    """What the allocator must have handed out at the peak."""
    return sum(sum(tensors.values()) for tensors in model.values())


def of_mlp(
    model_of: Callable[[PlainMlp, str], MemoryModel], model: nn.Module, task: Task, precision: str
) -> MemoryModel:
    """``model_of`` where the task is a plain MLP; nothing for other networks, which are measured only."""
    try:
        return model_of(plain_mlp(model, task), precision)
    except BackendUnavailable:
        return {}


class Ledger:
    """Live tensors, each under a name of its own; :attr:`peak` is the breakdown of the fullest moment so far."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[str, int]] = {}
        self._fullest: dict[str, tuple[str, int]] = {}

    def alloc(self, kind: str, name: str, elements: int, itemsize: int) -> None:
        self._live[name] = (kind, elements * itemsize)
        if _total(self._live) > _total(self._fullest):
            self._fullest = dict(self._live)

    def free(self, *names: str) -> None:
        for name in names:
            self._live.pop(name, None)

    @property
    def peak(self) -> MemoryModel:
        by_kind = {kind: {n: size for n, (k, size) in self._fullest.items() if k == kind} for kind in TENSOR_KINDS}
        return {kind: tensors for kind, tensors in by_kind.items() if tensors}


def _total(tensors: dict[str, tuple[str, int]]) -> int:
    return sum(size for _, size in tensors.values())


def _inputs(task: PlainMlp) -> Ledger:
    ledger = Ledger()
    rows = task.rows * task.accumulate
    ledger.alloc("inputs", "x", rows * task.in_features, 4)
    if task.loss == "cross_entropy":
        ledger.alloc("inputs", "y", rows, 8)
    else:
        ledger.alloc("inputs", "y", rows * task.out_features, 4)
    return ledger


def _inputs_and_masters(task: PlainMlp, itemsize: int = 4) -> Ledger:
    ledger = _inputs(task)
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


def _alloc_sums(m: Ledger, task: PlainMlp) -> None:
    """The fp32 sums of the gradients of earlier micro-batches."""
    for layer, (fan_in, fan_out) in enumerate(pairwise(task.sizes), start=1):
        m.alloc("gradients", f"sum of dW{layer}", fan_in * fan_out, 4)
        m.alloc("gradients", f"sum of db{layer}", fan_out, 4)


def _alloc_update(m: Ledger, task: PlainMlp, adam_temporaries: int) -> None:
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


def autograd_peak(task: PlainMlp, precision: str) -> MemoryModel:
    """The peak of a step by autograd, with autocast where ``precision`` is 16-bit (backends fp32 and amp).

    Autograd keeps each layer's input and each relu's output, relu is not in place, and autocast keeps the 16-bit copies
    of the weights until the forward ends.
    """
    n, sizes, size = task.rows, task.sizes, PRECISIONS[precision].storage.bytes
    last, low = len(sizes) - 1, PRECISIONS[precision].is_16_bit
    m = _inputs_and_masters(task)
    if task.accumulate > 1:
        _alloc_sums(m, task)
    if task.loss == "mse":
        m.alloc("activations", "squares of the last step", n * sizes[-1], 4)
    if low:
        m.alloc("activations", "x 16-bit", n * sizes[0], size)
    for layer in range(1, last + 1):
        if low:
            m.alloc("cast cache", f"W{layer} 16-bit", sizes[layer - 1] * sizes[layer], size)
            m.alloc("cast cache", f"b{layer} 16-bit", sizes[layer], size)
        m.alloc("activations", f"a{layer}", n * sizes[layer], size)
        if layer < last:
            m.alloc("activations", f"z{layer}", n * sizes[layer], size)
            m.free(f"a{layer}")
    if low:
        m.alloc("activations", "logits fp32", n * sizes[-1], 4)
    if task.loss == "cross_entropy":
        m.alloc("activations", "log_probs", n * sizes[-1], 4)
        m.free(f"a{last}", "logits fp32")
    else:
        m.alloc("activations", "squares", n * sizes[-1], 4)
        m.alloc("activations", "squares, to be summed", n * sizes[-1], 4)
        m.free(
            "squares, to be summed", "squares of the last step"
        )  # the scalar that mse_loss returns keeps its squares
    m.free(*(f"b{layer} 16-bit" for layer in range(1, last + 1)), "W1 16-bit")  # W2.. are needed for dz
    if task.loss == "cross_entropy":
        m.alloc("gradients", "dlog_probs", n * sizes[-1], 4)
    m.alloc("gradients", "dlogits fp32", n * sizes[-1], 4)
    m.free("log_probs", "dlog_probs", "logits fp32", f"a{last}")
    if low:
        m.alloc("gradients", f"da{last}", n * sizes[-1], size)
        m.free("dlogits fp32")
    for layer in range(last, 0, -1):
        if layer > 1:
            m.alloc("gradients", f"dz{layer - 1}", n * sizes[layer - 1], size)
        m.alloc("gradients", f"dW{layer}", sizes[layer - 1] * sizes[layer], size)
        m.alloc("gradients", f"db{layer}", sizes[layer], size)
        m.free(f"da{layer}", "dlogits fp32", f"W{layer} 16-bit")
        if layer == 1:
            m.free("x 16-bit")
        if low:
            m.alloc("gradients", f"dW{layer} fp32", sizes[layer - 1] * sizes[layer], 4)
            m.alloc("gradients", f"db{layer} fp32", sizes[layer], 4)
            m.free(f"dW{layer}", f"db{layer}")
        if task.accumulate > 1:  # each is added where it is made
            m.free(f"dW{layer}", f"db{layer}", f"dW{layer} fp32", f"db{layer} fp32")
        if layer > 1:
            m.alloc("gradients", f"da{layer - 1}", n * sizes[layer - 1], size)
            m.free(f"dz{layer - 1}", f"z{layer - 1}")
    m.free("da1")
    _alloc_update(m, task, adam_temporaries=2)  # sqrt, and that over the bias correction
    return m.peak


def amp_graph_peak(task: PlainMlp, precision: str) -> MemoryModel:
    """The peak of backend amp_graph: that of amp, and the batch once more where the graph reads it."""
    model = autograd_peak(task, precision)
    return {**model, "inputs": {**model["inputs"], **{f"static {k}": size for k, size in model["inputs"].items()}}}


def scratch_peak(task: PlainMlp, precision: str, master_params: bool = True, softmax: str = "fp32") -> MemoryModel:
    """The peak of backend scratch: relu and its mask work in place: two activations are live at a time, not three."""
    n, sizes, size = task.rows, task.sizes, PRECISIONS[precision].storage.bytes
    last, low = len(sizes) - 1, PRECISIONS[precision].is_16_bit
    loss_size, cast = FORMATS[softmax].bytes, FORMATS[softmax] != PRECISIONS[precision].storage
    m = _inputs_and_masters(task, 4 if master_params else size)
    if task.accumulate > 1:
        _alloc_sums(m, task)
    if low and master_params:
        for layer, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
            m.alloc("compute copies", f"W{layer} 16-bit", fan_in * fan_out, size)
            m.alloc("compute copies", f"b{layer} 16-bit", fan_out, size)
    if low:
        m.alloc("activations", "z0", n * sizes[0], size)
    for layer in range(1, last + 1):
        m.alloc("activations", f"z{layer}", n * sizes[layer], size)
    if cast:
        m.alloc("activations", f"logits {softmax}", n * sizes[-1], loss_size)
    for name in ("shifted", "log_probs") if task.loss == "cross_entropy" else ("difference",):
        m.alloc("activations", name, n * sizes[-1], loss_size)
    m.alloc("gradients", "dlogits", n * sizes[-1], loss_size)
    m.free(f"z{last}", f"logits {softmax}", "shifted", "log_probs", "difference")
    if cast:
        m.alloc("gradients", f"da {softmax}", n * sizes[-1], loss_size)
    m.alloc("gradients", f"da{last}", n * sizes[-1], size)
    m.free("dlogits", f"da {softmax}")
    for layer in range(last, 0, -1):
        m.free(f"z{layer}")
        m.alloc("gradients", f"dW{layer}", sizes[layer - 1] * sizes[layer], size)
        m.alloc("gradients", f"db{layer}", sizes[layer], size)
        if task.accumulate > 1:
            if low:  # torch adds 16-bit numbers to fp32 ones by way of an fp32 copy
                m.alloc("gradients", f"dW{layer} fp32", sizes[layer - 1] * sizes[layer], 4)
            m.free(f"dW{layer}", f"db{layer}", f"dW{layer} fp32")
        if layer > 1:
            m.alloc("gradients", f"da{layer - 1}", n * sizes[layer - 1], size)
            m.free(f"da{layer}")
    m.free("da1", "z0", *(f"{name}{layer} 16-bit" for name in "Wb" for layer in range(1, last + 1)))
    if low and task.accumulate == 1:
        for layer, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
            m.alloc("gradients", f"dW{layer} fp32", fan_in * fan_out, 4)
            m.alloc("gradients", f"db{layer} fp32", fan_out, 4)
            m.free(f"dW{layer}", f"db{layer}")
    _alloc_update(m, task, adam_temporaries=1)
    return m.peak


def fused_peak(task: PlainMlp, precision: str) -> MemoryModel:
    """The peak of backend fused: every buffer is made once, so the peak is their sum, padding (flat.py) included.

    dW_1 lies where the 16-bit W_1 was, unless micro-batches are accumulated. On CUDA, what linear_backward takes for a
    layer of many outputs (dz, the size of z), and a graph's copy of an fp32 batch, come on top.
    """
    n, sizes, size = task.rows, task.sizes, PRECISIONS[precision].storage.bytes
    last, low = len(sizes) - 1, PRECISIONS[precision].is_16_bit
    m = _inputs(task)
    for name, (_, length) in flat.sections(sizes).items():
        m.alloc("master params", f"master {name}", length, 4)
        for kind in remembered(task):
            m.alloc("optimizer state", f"{kind} {name}", length, 4)
        in_place = low and name == "W1" and task.accumulate == 1
        if low:
            m.alloc("compute copies", f"{name} 16-bit" + (" = dW1" if in_place else ""), length, size)
        if not in_place:
            m.alloc("gradients", f"d{name}", length, size)
        if task.accumulate > 1:
            m.alloc("gradients", f"sum of d{name}", length, 4)
    for layer, width in enumerate(sizes):
        name = f"z{layer}" if layer == 0 else f"z{layer} = da{layer}" if layer < last else "logits"
        if low or layer > 0:
            m.alloc("activations", name, n * flat.row_elements(width), size)
    m.alloc("gradients", "dlogits", n * flat.row_elements(sizes[-1]), size)
    return m.peak
