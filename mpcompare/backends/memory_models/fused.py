"""The memory model of backend fused."""

from mpcompare.backends.memory_models.mlp import inputs, remembered
from mpcompare.contract import MemoryModel
from mpcompare.native import flat
from mpcompare.precision import DTYPES
from mpcompare.tasks.mlp import PlainMlp


def fused_peak(task: PlainMlp, precision: str) -> MemoryModel:
    """The peak of backend fused: every buffer is made once, so the peak is their sum, padding (flat.py) included.

    dW_1 lies where the 16-bit W_1 was, unless micro-batches are accumulated. On CUDA, what linear_backward takes for a
    layer of many outputs (dz, the size of z), and a graph's copy of an fp32 batch, come on top.
    """
    n, sizes, size = task.rows, task.sizes, DTYPES[precision].itemsize
    last, low = len(sizes) - 1, size < 4
    m = inputs(task)
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
