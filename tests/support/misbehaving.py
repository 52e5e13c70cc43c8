"""Backends that go wrong, for the tests of the launcher, which runs them in processes of their own."""

import ctypes
import os
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import torch

from mpcompare.backends.amp import Amp
from mpcompare.backends.fp32 import Fp32


class Killed(Fp32):
    """``fp32`` that is killed in its second step, as the kernel kills where memory runs out."""

    def update(self):
        if hasattr(self, "second"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.second = True
        super().update()


class HasChildren(Fp32):
    """``fp32`` that starts a program in a session of its own. Nobody waits for the program."""

    def forward(self, x, y):
        if not hasattr(HasChildren, "child"):
            HasChildren.child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            Path("child").write_text(str(self.child.pid))
        return super().forward(x, y)


class HasAThread(Fp32):
    """``fp32`` with a thread that sleeps, and is no daemon."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if threading.active_count() == 1:
            threading.Thread(target=time.sleep, args=(1000,), name="reader").start()


class Hung(Fp32):
    def backward(self):
        time.sleep(1000)


class Exits(Fp32):
    def backward(self):
        print("something native gave up", flush=True)
        os._exit(3)


class Segfault(Fp32):
    def backward(self):
        ctypes.string_at(0)


class Raises(Fp32):
    def backward(self):
        raise ZeroDivisionError("a bug")


class Logged(Fp32):
    """``fp32`` that writes when each step began and ended, into a file of its own in the current folder."""

    def forward(self, x, y):
        self.began = time.monotonic()
        return super().forward(x, y)

    def update(self):
        super().update()
        time.sleep(0.002)
        with Path(f"steps-{os.getpid()}").open("a") as file:
            file.write(f"{self.began} {time.monotonic()}\n")


class ComputesOutOfTurn(Fp32):
    """``fp32`` with a thread that goes on when its turn is over."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if threading.active_count() == 1:
            threading.Thread(target=self.compute, daemon=True).start()

    def compute(self):
        matrix = torch.full((256, 256), 1e-3)
        while True:
            matrix @ matrix  # torch lets go of the GIL


class ComputesALittleOutOfTurn(ComputesOutOfTurn):
    """Rests for 24 times as long as it computes: 0.04 cores."""

    def compute(self):
        while True:
            end = time.thread_time() + 0.002
            while time.thread_time() < end:
                pass
            time.sleep(0.048)


class SlowClock(Amp):
    """``amp`` that lets all clocks of its process go at half their rate."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        for name in ("perf_counter", "perf_counter_ns", "monotonic"):
            if not isinstance(clock := getattr(time, name), partial):
                setattr(time, name, partial(half, clock))


def half(clock):
    now = clock()
    return type(now)(now / 2)
