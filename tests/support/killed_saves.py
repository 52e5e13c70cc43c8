"""Saves that are killed, in a process of its own that has no other threads and so can fork:

python killed_saves.py FOLDER 1,2 3       step 3 after 1 and 2, killed at each call of the system that Python sees
python killed_saves.py FOLDER sometime    one step after the other, killed at 20 random moments

It stops with an AssertionError where a killed save has left something else than it may leave.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from mpcompare.checkpoints import Checkpoint, load, newest, save


def checkpoint(step: int, size: int) -> Checkpoint:
    """Returns a checkpoint whose numbers all are its step."""
    state = {
        "params": {"w": torch.full((size,), float(step))},
        "buffers": {},
        "optimizer": {"momentum_buffer": {"w": torch.full((size,), float(step))}},
        "loss_scale": {"scale": float(step)},
    }
    return Checkpoint(state, step, step, step, {"seed": step})


def check(folder: Path) -> int:
    """Asserts that every checkpoint in the folder is whole, and returns the step of the newest."""
    steps = [whole(path) for path in folder.glob("step-*")]
    assert whole(newest(folder)) == max(steps)
    return max(steps)


def whole(path: Path) -> int:
    """Asserts that a checkpoint is whole, and returns its step."""
    saved = load(path)
    values = {*saved.state["params"]["w"].tolist(), *saved.state["optimizer"]["momentum_buffer"]["w"].tolist()}
    assert values == {saved.step} == {saved.state["loss_scale"]["scale"]} == {saved.what_is_trained["seed"]}
    return saved.step


def forked(work: Callable[[], object]) -> int:
    """Starts ``work`` in a fork, and returns its process."""
    if child := os.fork():
        return child
    try:
        work()
    finally:
        os._exit(0)


def killed_at(call: int, work: Callable[[], object]) -> bool:
    """Runs ``work`` in a fork that is killed before its ``call``-th call, if it has one. Returns whether it was."""

    def dies() -> None:
        left = call

        def count(event: str, _: object) -> None:
            nonlocal left
            if event.startswith(("os.", "open", "shutil.")):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()

    status = os.waitpid(forked(dies), 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


def everywhere(folder: Path, steps: list[int], step: int) -> None:
    os.fsync = lambda handle: None  # takes most of the time, and a kill does not ask what is on the disk
    before = folder.with_name("before")
    for earlier in steps:
        save(before, checkpoint(earlier, 10), keep=3)
    call, killed = 1, True
    while killed:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        killed = killed_at(call, partial(save, folder, checkpoint(step, 10)))
        assert check(folder) in {steps[-1], step}
        save(folder, checkpoint(9, 10))
        assert check(folder) == 9
        assert len(list(folder.iterdir())) <= 2  # no leftovers
        call += 1
    assert call > 10


def sometime(folder: Path) -> None:
    moment, done = random.Random(0), 0
    for _ in range(20):
        reading, writing = os.pipe()

        def work(first: int = done + 1, writing: int = writing) -> None:
            for step in range(first, first + 10_000):
                save(folder, checkpoint(step, 200_000))
                os.write(writing, b".")

        child = forked(work)
        os.close(writing)
        os.read(reading, 1)  # the first is done
        time.sleep(moment.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        saved = done + 1
        while more := os.read(reading, 4096):
            saved += len(more)
        os.close(reading)
        done = check(folder)
        assert done in (saved, saved + 1)  # a checkpoint was in place, and not yet reported
    save(folder, checkpoint(done + 1, 10))
    assert len(list(folder.iterdir())) == 2
    assert check(folder) == done + 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if sys.argv[2] == "sometime":
        sometime(folder)
    else:
        everywhere(folder, list(map(int, sys.argv[2].split(","))), int(sys.argv[3]))
