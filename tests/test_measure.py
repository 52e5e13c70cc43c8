import time

import pytest
import torch
from conftest import BACKENDS, COLUMNS, make_batch, make_task
from hypothesis import given
from hypothesis import strategies as st

from mpcompare import measure, mlp, ops, train
from mpcompare.loss_scale import NoLossScale

CPU = torch.device("cpu")


def test_clock_times_what_lies_between_start_and_stop(device):
    clock = measure.clock(device)
    for seconds in (0.02, 0.04):
        time.sleep(0.03)  # not timed
        clock.start()
        if device.type == "cuda":
            torch.cuda._sleep(int(seconds * 1e9))
        else:
            time.sleep(seconds)
        clock.stop()
    first, second = clock.read()
    assert 5 < first < second
    if device.type == "cpu":
        assert first >= 20
    assert clock.read() == []


def test_percentiles_keep_every_step():
    values = [1.0] * 7 + [2.0] * 3 + [1000.0]
    assert measure.percentiles(values) == {"step_ms_p20": 1.0, "step_ms_p50": 1.0, "step_ms_p80": 2.0}


def test_peak_memory_is_the_fullest_moment(device):
    megabyte = 1 << 20
    before = torch.empty(megabyte, dtype=torch.uint8, device=device)

    def run():
        a = torch.empty(4 * megabyte, dtype=torch.uint8, device=device)
        b = torch.empty(8 * megabyte, dtype=torch.uint8, device=device)
        del a
        torch.empty(2 * megabyte, dtype=torch.uint8, device=device)
        del b

    assert measure.peak_memory(device, run) == 12 * megabyte
    assert measure.peak_memory(device, lambda: None) == 0
    del before


@given(
    name_precision=st.sampled_from([c for c in COLUMNS if c != ("amp", "fp16")]),  # slow on a CPU, and bf16's twin
    sizes=st.lists(st.integers(256, 768), min_size=2, max_size=5), batch_size=st.integers(256, 1024),
    loss=st.sampled_from(["cross_entropy", "mse"]), momentum=st.sampled_from([0.0, 0.9]),
)  # fmt: skip
def test_memory_model_is_what_is_measured(name_precision, sizes, batch_size, loss, momentum):
    """Every large tensor is in the model: it differs from the allocator's own count by small temporaries only."""
    name, precision = name_precision
    task = make_task(
        in_features=sizes[0], hidden=sizes[1:-1], out_features=sizes[-1], batch_size=batch_size, loss=loss,
        momentum=momentum,
    )  # fmt: skip
    ops.load("cpu")
    x, y = make_batch(task, CPU)
    params, cls = mlp.init_params(task.sizes, 0), BACKENDS[name]
    peak = measure.peak_memory(
        CPU, lambda: train._two_steps(cls(params, task, precision, NoLossScale(), "native"), x, y)
    )
    model = cls.memory_model(task, precision, "native")
    # Not in the model: a few numbers a row inside the loss, and oneDNN's packing buffers for 16-bit products.
    assert peak + x.nbytes + y.nbytes == pytest.approx(sum(model.values()), rel=0.01, abs=64 * batch_size)
