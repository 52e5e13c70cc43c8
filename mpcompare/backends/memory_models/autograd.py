"""The memory model of a step by autograd: backends fp32 and amp, and amp_graph, which captures one."""

from mpcompare.backends.memory_models.mlp import alloc_sums, alloc_update, inputs_and_masters
from mpcompare.contract import MemoryModel
from mpcompare.precision import DTYPES
from mpcompare.tasks.mlp import PlainMlp


def autograd_peak(task: PlainMlp, precision: str) -> MemoryModel:
    """The peak of a step by autograd, with autocast where ``precision`` is 16-bit (backends fp32 and amp).

    Autograd keeps each layer's input and each relu's output, relu is not in place, and autocast keeps the 16-bit copies
    of the weights until the forward ends.
    """
    n, sizes, size = task.rows, task.sizes, DTYPES[precision].itemsize
    last, low = len(sizes) - 1, size < 4
    m = inputs_and_masters(task)
    if task.accumulate > 1:
        alloc_sums(m, task)
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
    alloc_update(m, task, adam_temporaries=2)  # sqrt, and that over the bias correction
    return m.peak


def amp_graph_peak(task: PlainMlp, precision: str) -> MemoryModel:
    """The peak of backend amp_graph: that of amp, and the batch once more where the graph reads it."""
    model = autograd_peak(task, precision)
    return {**model, "inputs": {**model["inputs"], **{f"static {k}": size for k, size in model["inputs"].items()}}}
