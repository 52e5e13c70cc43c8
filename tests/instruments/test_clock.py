"""The clock, waiting for a machine that is quiet, and percentiles."""

import hashlib
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
    for seconds in (0.02, 0.2):  # far apart: on a GPU that others use, either may take twice as long
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


def test_settle_waits_for_threads_that_others_keep_from_a_core(monkeypatch):
    """Such a thread uses no time of a core, and yet it is not done."""
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 1_000_000))  # without the GIL
    thread.start()
    assert not clock.settle(limit_s=0.05)
    thread.join()
    assert clock.settle()


def test_percentiles_keep_every_step():
    values = [1.0] * 7 + [2.0] * 3 + [1000.0]
    assert clock.percentiles(values) == {"step_ms_p20": 1.0, "step_ms_p50": 1.0, "step_ms_p80": 2.0}
