"""The clock, waiting for a machine that is quiet, and percentiles."""

import threading
import time

import pytest
import torch

from mpcompare.instruments import clock


def test_clock_times_what_lies_between_two_marks(device):
    timer = clock.clock(device)

    def work(seconds):
        if device.type == "cuda":
            torch.cuda._sleep(int(seconds * 1e9))
        else:
            time.sleep(seconds)

    timer.mark()
    for seconds in (0.02, 0.04):
        work(seconds)
        timer.mark()
    first, second = timer.read()
    assert 5 < first < second
    if device.type == "cpu":
        assert first >= 20
    assert timer.read() == []


@pytest.mark.quiet
def test_settle_waits_for_threads_that_spin():
    assert clock.settle()
    done = threading.Event()

    def spin():
        while not done.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        start = time.monotonic()
        assert not clock.settle(limit_s=0.1)
        assert time.monotonic() - start >= 0.1
    finally:
        done.set()
        thread.join()


def test_percentiles_keep_every_step():
    values = [1.0] * 7 + [2.0] * 3 + [1000.0]
    assert clock.percentiles(values) == {"step_ms_p20": 1.0, "step_ms_p50": 1.0, "step_ms_p80": 2.0}
