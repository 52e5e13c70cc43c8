import itertools
import subprocess
import sys
import threading
import time

import torch

from mpcompare.entrant import entrant as train
from mpcompare.measure import clock as measure
from mpcompare.measure.bystanders import Watch

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
