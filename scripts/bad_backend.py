"""The bad backends of ``bad_backends.py``: plain FP32, in which one answer or one deed is wrong."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mpcompare.backends.fp32 import Fp32


class Odd:
    """A value that cannot be printed, compared or used."""

    def __repr__(self) -> str:
        raise RuntimeError("an Odd cannot be printed")

    __str__ = __eq__ = __bool__ = __repr__  # type: ignore[assignment]


def _raise(*_: object) -> None:
    raise RuntimeError("a \x1b[31mred $message$ of\ntwo lines")


def _loop(*_: object) -> None:
    raise RecursionError("maximum recursion depth exceeded")


ANSWERS: dict[str, Callable[[], Any]] = {  # returns the value that a method returns in place of its answer
    "none": lambda: None,
    "five": lambda: 5,
    "text": lambda: "$x_{1",
    "list": lambda: [1, {}],
    "keys": lambda: {5: None, "layer1.weight": "\x1b[31m"},
    "scalar": lambda: torch.tensor(float("nan")),
    "odd": Odd,
}
METHODS = ("forward", "loss_scale", "master_params", "buffers", "grads", "dtypes", "module_dtypes", "state_dict",
           "memory_model")  # fmt: skip


def _child(folder: Path) -> None:
    subprocess.Popen(["sleep", "1000"])


def _thread(folder: Path) -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()


def _closes_streams(folder: Path) -> None:
    os.close(1)
    os.close(2)


def _noise(folder: Path) -> None:
    sys.stdout.write("\x1b[2J" + "x" * 100_000)
    os.write(2, bytes(range(256)))


def _own_record(folder: Path) -> None:
    """Writes a record of its own, in the place of the harness's."""
    (folder / "result.json").write_text('{"status": "ok"')


def _removes_its_folder(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    folder.rename(folder.with_name("elsewhere"))


def _loses_its_working_directory(folder: Path) -> None:
    (gone := folder / "gone").mkdir()
    os.chdir(gone)
    gone.rmdir()


DEEDS: dict[str, Callable[[Path], object]] = {  # what it does in a step
    "raises": _raise,
    "recurses": _loop,
    "exits": lambda _: sys.exit(0),
    "exits_3": lambda _: sys.exit("three"),
    "ends": lambda _: os._exit(0),
    "ends_1": lambda _: os._exit(1),
    "is_killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "is_ended": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "crashes": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "aborts": lambda _: os.abort(),
    "interrupts": lambda _: os.kill(os.getpid(), signal.SIGINT),
    "starts_a_child": _child,
    "starts_a_thread": _thread,
    "closes_its_streams": _closes_streams,
    "prints_noise": _noise,
    "writes_its_record": _own_record,
    "removes_its_folder": _removes_its_folder,
    "default_float64": lambda _: torch.set_default_dtype(torch.float64),
    "one_seed": lambda _: torch.manual_seed(0),
    "no_gradients": lambda _: torch.set_grad_enabled(False),
    "inference": lambda _: torch.inference_mode().__enter__(),
    "threads": lambda _: torch.set_num_threads(7),
    "no_alarm": lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "memory": lambda _: torch.empty(1 << 50),
    "loses_its_working_directory": _loses_its_working_directory,
    "no_clock": lambda _: setattr(time, "perf_counter", _raise),
}


class Bad(Fp32):
    """FP32 with a wrong ``answer`` of a ``method``, or with a wrong ``deed``, from step ``at`` on."""

    def __init__(self, *args: Any, method: str = "", answer: str = "", deed: str = "", at: int = 0) -> None:
        super().__init__(*args)
        self.at, self.steps, self.deed = at, 0, deed
        if method:
            right = getattr(self, method)
            setattr(self, method, lambda *a: right(*a) if self.steps <= at else ANSWERS[answer]())

    def step(self, lr: Any) -> None:
        super().step(lr)
        self.steps += 1
        if self.deed and self.steps == self.at + 1:
            DEEDS[self.deed](_folder())


def _folder() -> Path:
    """Returns the run's folder."""
    return Path(os.environ["BAD_BACKEND_FOLDER"])
