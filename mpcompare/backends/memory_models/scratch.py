"""The memory model of backend scratch."""

from itertools import pairwise

from mpcompare.backends.memory_models.mlp import alloc_sums, alloc_update, inputs_and_masters
from mpcompare.contract import MemoryModel
from mpcompare.precision import DTYPES
from mpcompare.tasks.mlp import PlainMlp


def scratch_peak(task: PlainMlp, precision: str, master_params: bool = True, softmax: str = "fp32") -> MemoryModel:
    """The peak of backend scratch: relu and its mask work in place: two activations are live at a time, not three."""
    n, sizes, size = task.rows, task.sizes, DTYPES[precision].itemsize
    last, low = len(sizes) - 1, size < 4
    loss_size, cast = DTYPES[softmax].itemsize, DTYPES[softmax] is not DTYPES[precision]
    m = inputs_and_masters(task, 4 if master_params else size)
    if task.accumulate > 1:
        alloc_sums(m, task)
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
    alloc_update(m, task, adam_temporaries=1)
    return m.peak
