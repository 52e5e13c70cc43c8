from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.backends import BACKENDS, CPU_BACKENDS, make_backend
from support.tasks import make_batch, make_task, mlp_of

from mpcompare.contract import Stepper
from mpcompare.cost import TENSOR_KINDS, allocated_bytes
from mpcompare.entrant.memory import first_steps
from mpcompare.instruments import meter
from mpcompare.loss_scale import NoLossScale
from mpcompare.native import flat, ops
from mpcompare.report import remarks
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.task import params_of

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("two_threads")
# amp in fp16 is slow on a CPU and has the model of bf16, amp_graph captures no graph there, and master_weights, which
# trains any module, has no model.
MEASURED = [b for b in CPU_BACKENDS if b != ("amp", "fp16") and b[0] not in ("amp_graph", "master_weights")]
OPTIMIZERS = [Sgd(0.1), Sgd(0.1, 0.9), Sgd(0.1, 0.9, nesterov=True, weight_decay=0.1), Adam(weight_decay=0.1), AdamW()]


def test_kinds_tell_autocast_from_a_backend_that_keeps_its_own_copies():
    # The widest layer is the last, so the peak is at its relu, where the weights before it are still needed.
    task = make_task(hidden=[16, 64], momentum=0.9, batch_size=512)
    weights = sum(p.numel() for p in params_of(task.new_model(0, CPU)).values())
    batch = task.batch_size * (4 * mlp_of(task).in_features + 8)
    for name, precision, copies in (("scratch", "bf16", "compute copies"), ("fused", "fp16", "compute copies"),
                                    ("amp", "bf16", "cast cache"), ("fp32", "fp32", None)):  # fmt: skip
        model = make_backend(name, task, precision, CPU).memory_model()
        assert {"compute copies", "cast cache"} & set(model) == ({copies} if copies else set())
        sizes = {kind: sum(tensors.values()) for kind, tensors in model.items()}
        kept = flat.elements(mlp_of(task).sizes) if name == "fused" else weights  # padded there
        assert (sizes["inputs"], sizes["master params"], sizes["optimizer state"]) == (batch, 4 * kept, 4 * kept)
        if name == "fused":
            assert sizes[copies] == 2 * kept


@cache
def products_take_a_buffer():
    """Returns whether torch's bf16 products take memory beyond their results. On CPUs without instructions for bf16
    they sum in a buffer of fp32, which is no tensor of the model. A report names the difference, and the product."""
    a = torch.ones(512, 512, dtype=torch.bfloat16)
    return meter.peak_memory(CPU, lambda: a @ a).bytes > 1.5 * a.nbytes


def measured_and_modelled(name, task, initial, precision, x, y):
    """Returns the peak of the first steps, in bytes, and the memory model."""
    made = []

    def run():
        backend = BACKENDS[name](initial, task, precision, NoLossScale())
        made.append(first_steps(Stepper(backend, task.new_rates()), task.micro_batches(x, y)))
        return made

    return meter.peak_memory(CPU, run).bytes, made[0].memory_model()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [("amp", "bf16"), ("fp32", "fp32")])
def test_memory_model_is_what_is_measured_at_the_default_task(name, precision):
    """The default sweep has this shape and this tolerance. A run takes up to 1 GB."""
    if name == "amp" and products_take_a_buffer():
        pytest.skip("torch's bf16 products take a buffer on this CPU")
    task = make_task(in_features=784, hidden=[8192], out_features=10, batch_size=8192)
    x, y = make_batch(task, CPU)
    peak, model = measured_and_modelled(name, task, task.new_model(0, CPU), precision, x, y)
    assert peak + x.nbytes + y.nbytes == pytest.approx(allocated_bytes(model), rel=remarks.TOLERANCE)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    name_precision=st.sampled_from(MEASURED),
    sizes=st.lists(st.integers(256, 768), min_size=2, max_size=5), batch_size=st.integers(256, 1024),
    loss=st.sampled_from(["cross_entropy", "mse"]), optimizer=st.sampled_from(OPTIMIZERS),
    accumulate=st.sampled_from([1, 2, 4]), clip_norm=st.sampled_from([None, 0.1]),
)  # fmt: skip
@example(  # the peak is where a dW that was added to its sum is live together with the next dW
    name_precision=("scratch", "fp32"), sizes=[256, 512, 256], batch_size=256, loss="cross_entropy",
    optimizer=OPTIMIZERS[0], accumulate=2, clip_norm=None,
)  # fmt: skip
def test_memory_model_is_what_is_measured(name_precision, sizes, batch_size, loss, optimizer, accumulate, clip_norm):
    """The model has every large tensor, so it differs from the allocator's own count by small temporaries only."""
    name, precision = name_precision
    assume(name != "amp" or not products_take_a_buffer())
    task = make_task(
        in_features=sizes[0], hidden=sizes[1:-1], out_features=sizes[-1], batch_size=batch_size * accumulate, loss=loss,
    )  # fmt: skip
    task = replace(task, optimizer=optimizer, accumulate=accumulate, clip_norm=clip_norm)
    ops.load("cpu")
    x, y = make_batch(task, CPU)
    peak, model = measured_and_modelled(name, task, task.new_model(0, CPU), precision, x, y)
    assert list(model) == [kind for kind in TENSOR_KINDS if kind in model]
    # Not in the model: a few numbers a row inside the loss, and oneDNN's packing buffers for 16-bit products.
    assert peak + x.nbytes + y.nbytes == pytest.approx(allocated_bytes(model), rel=0.01, abs=64 * batch_size)


def test_a_network_that_is_no_mlp_has_no_model():
    """``master_weights``, which trains any module, has no model either. The measured peaks stand alone."""
    task = replace(make_task(), model=lambda: torch.nn.Sequential(torch.nn.Linear(20, 5), torch.nn.GELU()))
    for name, precision in (("fp32", "fp32"), ("amp", "bf16"), ("master_weights", "bf16")):
        assert make_backend(name, task, precision, CPU).memory_model() == {}
    assert make_backend("master_weights", make_task(), "bf16", CPU).memory_model() == {}
