"""The memory model of a step by autograd: for the backends fp32 and amp, and for amp_graph, which captures a step.

Autograd keeps each layer's input and each relu's output. Relu is not in place, and autocast keeps the 16-bit copies of
the weights until the forward ends.
"""

from mpcompare.backends.memory_models.mlp import alloc_both, alloc_update, ledger_before_a_step
from mpcompare.contract import MemoryModel
from mpcompare.cost import Ledger
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.mlp import PlainMlp


def autograd_peak(task: PlainMlp, precision: str) -> MemoryModel:
    """Returns the tensors at the peak of a step by autograd, with autocast where ``precision`` has 16 bits."""
    size = PRECISIONS[precision].storage.bytes
    ledger = ledger_before_a_step(task)
    _forward(ledger, task, size)
    _loss(ledger, task, size)
    _backward(ledger, task, size)
    alloc_update(ledger, task, adam_temporaries=2)  # sqrt(v), and sqrt(v) over the bias correction
    return ledger.peak


def captured_peak(task: PlainMlp, precision: str) -> MemoryModel:
    """Returns the tensors at the peak of the step as a CUDA graph. The graph reads a copy of the batch at a place of
    its own."""
    model = autograd_peak(task, precision)
    static = {f"static {name}": size for name, size in model["inputs"].items()}
    return {**model, "inputs": {**model["inputs"], **static}}


def _forward(ledger: Ledger, task: PlainMlp, size: int) -> None:
    """Replays ``a_l = z_{l-1} W_l + b_l, z_l = relu(a_l)`` in ``size`` bytes an element; z_l is kept, a_l is not."""
    n, sizes, last, low = task.rows, task.sizes, len(task.sizes) - 1, size < 4
    if task.loss == "mse":
        ledger.alloc("activations", "squares of the last step", n * sizes[-1], 4)
    if low:
        ledger.alloc("activations", "x 16-bit", n * sizes[0], size)
    for layer in range(1, last + 1):
        if low:
            alloc_both(ledger, "cast cache", "{} 16-bit", task, layer, size)
        ledger.alloc("activations", f"a{layer}", n * sizes[layer], size)
        if layer < last:
            ledger.alloc("activations", f"z{layer}", n * sizes[layer], size)
            ledger.free(f"a{layer}")


def _loss(ledger: Ledger, task: PlainMlp, size: int) -> None:
    """Replays the loss, from fp32 logits; the end of autocast, which drops the copies that no gradient needs; and the
    gradient of the logits in fp32, with its cast, da_L."""
    outputs, last = task.rows * task.out_features, len(task.sizes) - 1
    if size < 4:
        ledger.alloc("activations", "logits fp32", outputs, 4)
    if task.loss == "cross_entropy":
        ledger.alloc("activations", "log_probs", outputs, 4)
        ledger.free(f"a{last}", "logits fp32")
    else:
        ledger.alloc("activations", "squares", outputs, 4)
        ledger.alloc("activations", "squares, to be summed", outputs, 4)
        # The scalar that mse_loss returns keeps its squares, and a backend keeps the scalar until the next step.
        ledger.free("squares, to be summed", "squares of the last step")
    ledger.free(*(f"b{layer} 16-bit" for layer in range(1, last + 1)), "W1 16-bit")  # W2.. are needed for dz
    if task.loss == "cross_entropy":
        ledger.alloc("gradients", "dlog_probs", outputs, 4)
    ledger.alloc("gradients", "dlogits fp32", outputs, 4)
    ledger.free("log_probs", "dlog_probs", "logits fp32", f"a{last}")
    if size < 4:
        ledger.alloc("gradients", f"da{last}", outputs, size)
        ledger.free("dlogits fp32")


def _backward(ledger: Ledger, task: PlainMlp, size: int) -> None:
    """Replays dz, dW and db of each layer, last to first; 16-bit dW and db are cast to fp32, the parameters' dtype."""
    n, sizes, last, low = task.rows, task.sizes, len(task.sizes) - 1, size < 4
    for layer in range(last, 0, -1):
        if layer > 1:
            ledger.alloc("gradients", f"dz{layer - 1}", n * sizes[layer - 1], size)
        alloc_both(ledger, "gradients", "d{}", task, layer, size)
        ledger.free(f"da{layer}", "dlogits fp32", f"W{layer} 16-bit")
        if layer == 1:
            ledger.free("x 16-bit")
        if low:
            alloc_both(ledger, "gradients", "d{} fp32", task, layer, 4)
            ledger.free(f"dW{layer}", f"db{layer}")
        if task.accumulate > 1:  # each is added to the sums where it is made
            ledger.free(f"dW{layer}", f"db{layer}", f"dW{layer} fp32", f"db{layer} fp32")
        if layer > 1:
            ledger.alloc("gradients", f"da{layer - 1}", n * sizes[layer - 1], size)
            ledger.free(f"dz{layer - 1}", f"z{layer - 1}")
    ledger.free("da1")
