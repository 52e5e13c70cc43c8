"""The memory model of the backend fused. Every buffer is made once, so the peak is their sum, padding included."""

from mpcompare.backends.memory_models.mlp import ledger_with_inputs, state_kinds
from mpcompare.contract import MemoryModel
from mpcompare.native import flat
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.mlp import PlainMlp


def fused_peak(task: PlainMlp, precision: str) -> MemoryModel:
    """Returns all tensors of fused, padded as native/flat.py lays them out.

    dW_1 lies where the 16-bit W_1 was, unless micro-batches are accumulated. On CUDA three things are not modelled:
    linear_backward's dz, of the size of z, for a layer of many outputs; its sums of each block of its kernel, for a
    layer of few outputs; and a graph's copy of an fp32 batch.
    """
    n, sizes, size = task.rows, task.sizes, PRECISIONS[precision].storage.bytes
    last, low = len(sizes) - 1, size < 4
    ledger = ledger_with_inputs(task)
    for name, (_, length) in flat.sections(sizes).items():
        ledger.alloc("master params", f"master {name}", length, 4)
        for kind in state_kinds(task):
            ledger.alloc("optimizer state", f"{kind} {name}", length, 4)
        in_place = low and name == "W1" and task.accumulate == 1
        if low:
            ledger.alloc("compute copies", f"{name} 16-bit" + (" = dW1" if in_place else ""), length, size)
        if not in_place:
            ledger.alloc("gradients", f"d{name}", length, size)
        if task.accumulate > 1:
            ledger.alloc("gradients", f"sum of d{name}", length, 4)
    for layer, width in enumerate(sizes):
        name = f"z{layer}" if layer == 0 else f"z{layer} = da{layer}" if layer < last else "logits"
        if low or layer > 0:
            ledger.alloc("activations", name, n * flat.row_elements(width), size)
    ledger.alloc("gradients", "dlogits", n * flat.row_elements(sizes[-1]), size)
    return ledger.peak
