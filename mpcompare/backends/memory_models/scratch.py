"""The memory model of the backend scratch. Relu and its mask work in place: two activations are live at a time."""

from mpcompare.backends.memory_models.mlp import alloc_both, alloc_update, ledger_before_a_step
from mpcompare.contract import MemoryModel
from mpcompare.cost import Ledger
from mpcompare.precision import FORMATS, PRECISIONS
from mpcompare.tasks.mlp import PlainMlp


def scratch_peak(task: PlainMlp, precision: str, master_params: bool = True, softmax: str = "fp32") -> MemoryModel:
    """Returns the tensors at the peak of a step of scratch, whose products take nothing from torch's allocator. On a
    GPU torch's sum over rows takes a buffer that is not modelled; on an H200 it was as large as what is summed.

    ``master_params`` and ``softmax`` are the backend's options.
    """
    size = PRECISIONS[precision].storage.bytes
    ledger = ledger_before_a_step(task, 4 if master_params else size)
    _forward(ledger, task, size, copies=size < 4 and master_params)
    _loss(ledger, task, precision, softmax)
    _backward(ledger, task, size)
    if size < 4 and task.accumulate == 1:  # fp32 gradients are made one by one from the 16-bit ones
        for layer in range(1, len(task.sizes)):
            alloc_both(ledger, "gradients", "d{} fp32", task, layer, 4)
            ledger.free(f"dW{layer}", f"db{layer}")
    alloc_update(ledger, task, adam_temporaries=1)
    return ledger.peak


def _forward(ledger: Ledger, task: PlainMlp, size: int, copies: bool) -> None:
    """Replays z_0 .. z_L in ``size`` bytes an element, and before them the 16-bit ``copies`` of the masters, if any."""
    n, sizes = task.rows, task.sizes
    if copies:
        for layer in range(1, len(sizes)):
            alloc_both(ledger, "compute copies", "{} 16-bit", task, layer, size)
    if size < 4:
        ledger.alloc("activations", "z0", n * sizes[0], size)
    for layer in range(1, len(sizes)):
        ledger.alloc("activations", f"z{layer}", n * sizes[layer], size)


def _loss(ledger: Ledger, task: PlainMlp, precision: str, softmax: str) -> None:
    """Replays the loss and its gradient in the precision ``softmax``, and the gradient's cast, da_L."""
    outputs, last = task.rows * task.out_features, len(task.sizes) - 1
    loss_size, is_cast = FORMATS[softmax].bytes, FORMATS[softmax] != PRECISIONS[precision].storage
    if is_cast:
        ledger.alloc("activations", f"logits {softmax}", outputs, loss_size)
    for name in ("shifted", "log_probs") if task.loss == "cross_entropy" else ("difference",):
        ledger.alloc("activations", name, outputs, loss_size)
    ledger.alloc("gradients", "dlogits", outputs, loss_size)
    ledger.free(f"z{last}", f"logits {softmax}", "shifted", "log_probs", "difference")
    if is_cast:
        ledger.alloc("gradients", f"da {softmax}", outputs, loss_size)
    ledger.alloc("gradients", f"da{last}", outputs, PRECISIONS[precision].storage.bytes)
    ledger.free("dlogits", f"da {softmax}")


def _backward(ledger: Ledger, task: PlainMlp, size: int) -> None:
    """Replays dW, db and da of each layer, last to first; each frees its z, and the end frees the copies.

    A dW that was added to its sum is live until the next one is there: the loop's name for it holds it.
    """
    n, sizes, last = task.rows, task.sizes, len(task.sizes) - 1
    for layer in range(last, 0, -1):
        ledger.free(f"z{layer}")
        ledger.alloc("gradients", f"dW{layer}", sizes[layer - 1] * sizes[layer], size)
        if task.accumulate > 1:
            ledger.free(f"dW{layer + 1}")
            if size < 4:  # torch adds 16-bit numbers to fp32 ones by way of an fp32 copy
                ledger.alloc("gradients", f"dW{layer} fp32", sizes[layer - 1] * sizes[layer], 4)
                ledger.free(f"dW{layer} fp32")
        ledger.alloc("gradients", f"db{layer}", sizes[layer], size)
        if task.accumulate > 1:
            ledger.free(f"db{layer}")
        if layer > 1:
            ledger.alloc("gradients", f"da{layer - 1}", n * sizes[layer - 1], size)
            ledger.free(f"da{layer}")
    if task.accumulate > 1:
        ledger.free("dW1")
    ledger.free("da1", "z0", *(f"{name}{layer} 16-bit" for name in "Wb" for layer in range(1, last + 1)))
