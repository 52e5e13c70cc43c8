"""The kinds of faults of ``faults.py``: each breaks a run, a record or a checkpoint, and looks what it cost."""

import csv
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from faults_command import Command, digest, error_line, numbers_of

from mpcompare.checkpoints import CHECKPOINTS, load
from mpcompare.report.__main__ import main as report
from mpcompare.report.runs import UNREADABLE, read_any

RUN = (
    *("data=digits", "task.model.hidden=[16]", "task.batch_size=32", "task.samples=320", "train.warmup_steps=1"),
    *("train.checkpoint_every=3", "eval.every=5", "measure.budget_s=0.05", "measure.block_s=0.005"),
    *("inference.budget_s=0.01", "report.formats=[]", "verdict.enabled=false"),
)
STEPS = 21  # with the warm-up
WHOLE = (*RUN, f"train.steps={STEPS - 1}", "backend=fp32")


@dataclass
class Ground:
    """The runs to which nothing has happened, in a folder of their own: faults are compared with them.

    Attributes:
        lasts_s: the seconds that a run takes.
        others: the rows of a report on three runs, by their names.
        before: a hash of all these runs; no fault may change it.
    """

    folder: Path
    lasts_s: float = field(init=False)
    others: dict[str, dict[str, str]] = field(init=False)
    before: str = field(init=False)

    def __post_init__(self) -> None:
        runs = self.folder / "runs"
        for number, backend in enumerate(("fp32", "scratch", "amp")):
            command = Command(*WHOLE, f"backend={backend}", f"hydra.run.dir={runs / f'{number}-{backend}'}")
            code, said = command.end()
            assert code == 0, said
            if number == 0:
                self.lasts_s = time.monotonic() - command.began
        half = Command(*RUN, "train.steps=11", "backend=fp32", f"hydra.run.dir={self.folder / 'half'}")
        assert half.end()[0] == 0
        self.others = self.report_on(runs, self.folder / "report")[1]
        self.before = digest(runs)

    def report_on(self, runs: Path, out: Path) -> tuple[int, dict[str, dict[str, str]], str]:
        """Draws a report. Returns its exit code, its rows by the names of runs, and what it has printed."""
        code, said = Command(str(runs), f"--out={out}", "--formats", "--baseline=fp32", main=report).end()
        rows = {}
        if (out / "summary.csv").exists():
            with (out / "summary.csv").open(newline="") as lines:
                rows = {row["run"]: row for row in csv.DictReader(lines)}
        return code, rows, said


def kill(ground: Ground, folder: Path, draw: random.Random) -> None:
    """A run is killed, or asked to end, at any moment."""
    number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
    command = Command(*WHOLE, f"hydra.run.dir={folder / 'run'}")
    if not command.ended_within(draw.uniform(0, ground.lasts_s)):
        os.kill(command.pid, number)
    code, said = command.end()
    assert code in (0, 130, -signal.SIGKILL) or (code == -number and not (folder / "run" / "result.json").exists()), (
        code,
        said,
    )
    assert "Traceback" not in said, said
    _goes_on(ground, folder)


def disk(ground: Ground, folder: Path, draw: random.Random) -> None:
    """From any moment on no file can grow beyond some bytes, as on a full disk."""
    command = Command(*WHOLE, f"hydra.run.dir={folder / 'run'}")
    most = draw.choice((0, 0, draw.randrange(4000)))
    if not command.ended_within(draw.uniform(0, ground.lasts_s)):
        resource.prlimit(command.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    code, said = command.end()
    if code != 0:
        error_line(code, said)
    _goes_on(ground, folder)


def stream(ground: Ground, folder: Path, draw: random.Random) -> None:
    """Stdout, stderr or both are closed from the start, are full, or lose their reader at any moment."""
    how, which = draw.choice(("closed", "full", "lost")), draw.choice(((1,), (2,), (1, 2)))
    prepare: dict[str, Callable[[], None]] = {"closed": partial(_close, which), "full": partial(_fill, which)}
    command = Command(*WHOLE, f"hydra.run.dir={folder / 'run'}", prepare=prepare.get(how, lambda: None))
    if how == "lost":
        command.ended_within(draw.uniform(0, ground.lasts_s))
        command.lose_its_reader()
    code, said = command.end()
    assert code == 0, (how, which, code, said)
    _are_the_same(folder / "run", ground, 0)


def _close(which: tuple[int, ...]) -> None:
    for number in which:
        os.close(number)
        setattr(sys, {1: "stdout", 2: "stderr"}[number], None)  # as Python begins without it


def _fill(which: tuple[int, ...]) -> None:
    for number in which:
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def checkpoint(ground: Ground, folder: Path, draw: random.Random) -> None:
    """A file of the newest checkpoint is damaged: it is refused in one line, and the one before it can be taken."""
    shutil.copytree(ground.folder / "half", folder / "run")
    newest = folder / "run" / CHECKPOINTS / "step-000012"
    how = damage(draw.choice(sorted(newest.iterdir())), draw)
    code, said = Command(*WHOLE, f"resume={folder / 'run'}", f"hydra.run.dir={folder / 'refused'}").end()
    assert "step-000012" in error_line(code, said), (how, said)
    assert read_any(folder / "refused").result.status == "failed"
    _resumes(ground, folder, 9, "resume_older=true")


def record(ground: Ground, folder: Path, draw: random.Random) -> None:
    """A file of one of three records is damaged: the others have their rows, the same to the last digit."""
    shutil.copytree(ground.folder / "runs", folder / "runs")
    name = draw.choice(("1-scratch", "2-amp"))
    files = [path for path in sorted((folder / "runs" / name).iterdir()) if path.suffix in (".json", ".csv")]
    how = damage(draw.choice(files), draw)
    code, rows, said = ground.report_on(folder / "runs", folder / "report")
    if code == 2 and "these are not one comparison" in said:  # the damage changed a letter of the task itself
        return
    assert code in (0, 1), (how, code, said)
    assert "Traceback" not in said, (how, said)
    assert (folder / "report" / "index.html").stat().st_size > 1000, how
    assert rows.keys() == ground.others.keys(), how
    for other in rows.keys() - {name}:
        before = ground.others[other]
        changed = {key: text for key, text in rows[other].items() if _value(text) != _value(before[key])}
        assert not changed, (how, other, changed)


def _value(text: str) -> float | str:
    """Returns what a cell says: 32 in a column without gaps is 32.0 in one that has some."""
    try:
        return text if text == "nan" else float(text)
    except ValueError:
        return text


def damage(file: Path, draw: random.Random) -> str:
    """Damages a file. Returns how."""
    how = draw.choice(("flip", "flip", "cut", "empty", "grow", "gone", "pipe", "folder"))
    whole = bytearray(file.read_bytes())
    at = draw.randrange(len(whole))
    whole[at] ^= 1 << draw.randrange(8)
    file.unlink()
    if how in ("pipe", "folder"):
        (os.mkfifo if how == "pipe" else os.mkdir)(file)
    elif how != "gone":
        original = bytes(whole[:at]) + bytes([whole[at]])
        file.write_bytes({"flip": bytes(whole), "cut": original[:-1], "empty": b"", "grow": bytes(whole) * 2}[how])
    return f"{how} {file.name} at {at}"


def _goes_on(ground: Ground, folder: Path) -> None:
    """Checks what a fault has left of a run, and resumes it, or begins anew where it has no checkpoint."""
    run = folder / "run"
    saved = sorted((run / CHECKPOINTS).glob("step-*"))
    for each in saved:
        load(each)
    if (run / "result.json").exists():
        assert (left := read_any(run)).result.status != UNREADABLE, left.result.error
    steps = [int(each.name.removeprefix("step-")) for each in saved]
    _resumes(ground, folder, max((step for step in steps if step < STEPS), default=0))


def _resumes(ground: Ground, folder: Path, step: int, *more: str) -> None:
    """Resumes the run after a step, and compares it with a run to which nothing has happened."""
    resume = [f"resume={folder / 'run'}", *more] if step else []
    code, said = Command(*WHOLE, *resume, f"hydra.run.dir={folder / 'resumed'}").end()
    assert code == 0, said
    _are_the_same(folder / "resumed", ground, step)


def _are_the_same(run: Path, ground: Ground, after: int) -> None:
    """Checks that a run has the numbers of the run to which nothing has happened, bit for bit."""
    expected = numbers_of(ground.folder / "runs" / "0-fp32", after)
    for part, numbers in numbers_of(run, after).items():
        assert numbers == expected[part], f"after step {after} other {part}: {numbers}, expected {expected[part]}"


KINDS: dict[Callable[[Ground, Path, random.Random], None], int] = {  # with their shares
    kill: 40, disk: 20, stream: 10, checkpoint: 15, record: 15,
}  # fmt: skip
