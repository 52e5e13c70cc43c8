"""Training that is killed and resumed, in a process of its own that has no other threads and so can fork:

python killed_runs.py FOLDER KILLS

Runs of several backends are killed at random moments; each is resumed, until it is killed again or done. It stops with
an AssertionError where a run has lost more than it may, or does not continue bit for bit.
"""

import csv
import gc
import logging
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.backends import BACKENDS
from support.plans import SMALL_PLAN, replan
from support.tasks import make_task

from mpcompare.checkpoints import CHECKPOINTS, load
from mpcompare.entrant.entrant import compete
from mpcompare.entrant.plan import Plan
from mpcompare.loss_scale import DynamicLossScale, auto
from mpcompare.precision import PRECISIONS
from mpcompare.race.orders import Train
from mpcompare.records import RunRecorder
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.optimizers import AdamW
from mpcompare.tasks.schedules import Cosine
from mpcompare.verdict.examine.resume import lost_entries

STEPS = 40
RUNS = [("amp", "bf16"), ("scratch", "fp16"), ("fused", "fp16"), ("fp32", "fp32"), ("master_weights", "bf16")]


def plan_of(name: str, precision: str) -> Plan:
    data = digits(0, 320)
    task = make_task(in_features=784, out_features=10)
    scaled = PRECISIONS[precision].loss_scale == "dynamic"
    policy = DynamicLossScale(2.0**24, growth_interval=5)  # overflows, and grows
    return replan(
        SMALL_PLAN, backend=name, make_backend=BACKENDS[name], precision=precision,
        task=replace(task, optimizer=AdamW(0.01), schedule=Cosine(warmup_steps=5), clip_norm=1.0),
        load_data=lambda seed: data, loss_scale=policy if scaled else auto,
        train={"steps": STEPS, "warmup_steps": 0, "checkpoint_every": 1},
    )  # fmt: skip


def train(plan: Plan, folder: Path, begun: int) -> None:
    """Writes a byte to ``begun`` when training begins, and ends with the process when it is done."""
    folder.mkdir(parents=True)
    turns = compete(plan, RunRecorder(folder, {}))
    next(turns)
    event: Any = turns.send(Train())
    os.write(begun, b".")
    while event.done < STEPS:
        event = next(turns)


def forked(plan: Plan, folder: Path, kill_after_s: float | None) -> float | None:
    """Trains in a fork that is killed so long after it began. Returns the seconds that training took, or None if it was
    killed before it was done."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            train(plan, folder, writing)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    assert os.read(reading, 1), "it failed before it began"
    os.close(reading)
    start = time.monotonic()
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return None if status else time.monotonic() - start


def steps_of(folder: Path) -> list[dict[str, str]]:
    """Returns the rows of ``steps.csv`` without their times, which differ, and without a last one that is cut off."""
    file = folder / "steps.csv"
    text = file.read_text() if file.exists() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [{name: value for name, value in row.items() if name != "step_ms"} for row in rows]


class Told(logging.Handler):
    """Keeps what is logged in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def main(folder: Path, kills: int) -> None:
    moment, killed, number = random.Random(0), 0, 0
    told = Told()
    logging.getLogger("mpcompare").addHandler(told)
    courses = 0
    while killed < kills:
        plan = plan_of(*RUNS[courses % len(RUNS)])
        courses += 1
        whole = folder / f"whole{courses}"
        lasts_s = forked(plan, whole, None)
        assert lasts_s is not None
        expected, at, resume, done = steps_of(whole), 0, None, False
        assert len(expected) == STEPS
        while not done:
            number += 1
            run = folder / f"run{number}"
            kill = moment.uniform(0, 0.7 * lasts_s) if killed < kills else None
            done = forked(replan(plan, resume={"folder": resume, "older": True}), run, kill) is not None
            killed += not done
            steps = steps_of(run)
            assert steps == expected[at : at + len(steps)]
            if list((run / CHECKPOINTS).glob("step-*")):
                for path in (run / CHECKPOINTS).glob("step-*"):
                    load(path)  # raises where it is not whole
                now = load(run).step  # without an older one
                lost = at + len(steps) - now
                assert lost in (0, 1), f"{lost} steps are lost"  # a step is written before its checkpoint
                at, resume = now, run
                done = at == STEPS  # killed when all was done
            else:
                assert len(steps) <= 1
        ends = [load(each) for each in (whole, run)]
        assert ends[0].step == ends[1].step == STEPS
        assert lost_entries(ends[0].state, ends[1].state) == []
    assert killed == kills
    assert not told.records  # no older one was taken
    print(f"{killed} kills in {number} runs of {courses} courses")


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # imported objects; each run collects garbage, and walks through the other objects only
    main(Path(sys.argv[1]), int(sys.argv[2]))
