import itertools
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import BACKENDS, COLUMNS, make_batch, make_task
from hypothesis import given
from hypothesis import strategies as st

from mpcompare import measure, meter, mlp, ops, train
from mpcompare.load import Watch
from mpcompare.loss_scale import NoLossScale

CPU = torch.device("cpu")


def test_clock_times_what_lies_between_two_marks(device):
    clock = measure.clock(device)

    def work(seconds):
        if device.type == "cuda":
            torch.cuda._sleep(int(seconds * 1e9))
        else:
            time.sleep(seconds)

    clock.mark()
    for seconds in (0.02, 0.04):
        work(seconds)
        clock.mark()
    first, second = clock.read()
    assert 5 < first < second
    if device.type == "cpu":
        assert first >= 20
    assert clock.read() == []


def test_settle_waits_for_threads_that_spin():
    assert measure.settle()
    done = threading.Event()

    def spin():
        while not done.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        start = time.monotonic()
        assert not measure.settle(limit_s=0.1)
        assert time.monotonic() - start >= 0.1
    finally:
        done.set()
        thread.join()


def test_phases_of_a_step_are_timed_apart_and_their_clock_is_paid_for():
    class Sleeper:
        IDLE_PHASES = ("unscale",)

        def __getattr__(self, phase):
            seconds = {"forward": 0.003, "backward": 0.006}.get(phase, 0)
            return lambda *_: time.sleep(seconds)

    found = train.time_phases(Sleeper(), itertools.repeat((None, None)), 5, measure.CpuClock())
    assert 3 <= found["phase_ms"]["forward"] < 5
    assert 6 <= found["phase_ms"]["backward"] < 9
    assert found["phase_ms"]["unscale"] is None
    assert found["phase_ms"]["step"] < 1
    assert abs(found["phase_overhead"]) < 0.2


def test_a_block_takes_about_as_long_as_it_should():
    class Sleeper:
        def __getattr__(self, phase):
            return lambda *_: time.sleep(0.001 if phase == "forward" else 0)

    stream = itertools.repeat((None, None))
    assert 20 <= train.block_steps(Sleeper(), stream, 0.05, measure.CpuClock()) <= 50
    assert train.block_steps(Sleeper(), stream, 1e-6, measure.CpuClock()) == 1


def test_the_load_of_the_machine_is_seen():
    watch = Watch(CPU)
    watch.start()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(1)
    load = watch.stop()
    other.kill()
    assert set(load) == {"clock_mhz", "other_cores", "throttle"}
    if load["other_cores"] is not None:
        assert load["other_cores"] > 0.3
    assert load["throttle"] is None


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

    assert meter.peak_memory(device, run) == 12 * megabyte
    assert meter.peak_memory(device, lambda: None) == 0
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
    peak = meter.peak_memory(CPU, lambda: train._two_steps(cls(params, task, precision, NoLossScale(), "native"), x, y))
    model = cls.memory_model(task, precision, "native")
    # Not in the model: a few numbers a row inside the loss, and oneDNN's packing buffers for 16-bit products.
    assert peak + x.nbytes + y.nbytes == pytest.approx(sum(model.values()), rel=0.01, abs=64 * batch_size)
