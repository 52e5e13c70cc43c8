"""The progress of a run or a race on stderr: its stages and the time that is left in a terminal, lines elsewhere.

0-scratch-auto ✓ training ✓ examination ▸ timing   phases   memory   inference
1-amp-auto     ✓ training ✓ examination ▸ timing   phases   memory   inference
━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━ about 40 s left, then the report
timing: 7 rounds of blocks, known within 9.1 %, 6 of 10 s at most
"""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TextIO

import rich.console
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mpcompare.foreign import printable
from mpcompare.race.orders import Progress
from mpcompare.race.timetable import EXAMINATION, NOISE, SET_UP, TRAINING, Remaining, Timetable

LINE_EVERY_S = 10  # where there is no terminal
DRAW_EVERY_S = 0.1
NAME = 8  # characters that a long name has at least
SIGN_OF_LIFE_S = 3  # after so many seconds the seconds are counted
SIGNS = {"done": ("✓", "green"), "now": ("▸", "bold"), "ahead": (" ", "dim"), "out": ("✗", "red")}
ASCII = {"✓": "x", "▸": ">", " ": " ", "✗": "-"}
HIDDEN = {SET_UP: TRAINING, NOISE: EXAMINATION}  # stages that are shown as part of another, so that 80 columns suffice


class Board:
    """The stages of each entrant, drawn by its callers: a refreshing thread would run during the steps that are timed.

    Args:
        folders: the folder of each entrant, by its name.
        timetable: the timetable of these entrants, and of all other races of the sweep.
        lines: whether lines are shown where there is no terminal.
        before, after: what is said before and after the time that is left.
    """

    def __init__(
        self, folders: Mapping[str, Path], timetable: Timetable, lines: bool = True, before: str = "", after: str = ""
    ) -> None:
        self.console = rich.console.Console(stderr=True)
        self.folders, self.timetable, self.before, self.after = folders, timetable, before, after
        self.lines = lines or self.console.is_terminal
        self.live = Live(
            console=self.console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # what goes into a file stays in it
        )
        self.drawn = self.written = self.since = time.monotonic()
        self.stage = self.text = ""
        self.share = 0.0
        self.left: Remaining | None = None  # the time that is left, as it is shown
        self.said: set[str] = set()
        self.waiting: list[str] | None = []  # lines that wait for an entrant to train; None once one does
        self.until_the_end = ExitStack()

    def __enter__(self) -> "Board":
        if self.console.is_terminal:
            before = sys.stdout, sys.stderr
            self.until_the_end.enter_context(self.live)
            self.until_the_end.enter_context(_logs_above(before))
            self.refresh(at_once=True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.until_the_end.close()

    def progress(self, name: str, progress: Progress) -> None:
        """Moves on; draws at most ten times a second, or writes a line now and then."""
        if progress.stage not in ("", SET_UP) and self.waiting is not None:
            lines, self.waiting = self.waiting, None
            for each in lines:
                self.line(each)
        now = time.monotonic()
        self.timetable.go(self.folders[name], progress.stage, progress.done, progress.total, now)
        is_new = progress.stage not in ("", self.stage)
        if (doing := (progress.stage or self.stage, progress.text)) != (self.stage, self.text):
            self.since = now
        self.stage, self.text = doing
        self.refresh(at_once=is_new)
        if not self.console.is_terminal and now - self.written > LINE_EVERY_S:
            self.line(f"{name}: {'; '.join(filter(None, (self._doing(), self._time_left(now))))}")
            self.written = now

    def end_turn(self, name: str, gone: bool) -> None:
        """The turn of an entrant is over; one that is ``gone`` takes no other."""
        self.timetable.end_turn(self.folders[name], gone, time.monotonic())

    def say(self, name: str, text: str, is_error: bool, can_wait: bool = False) -> None:
        """Writes a line of one entrant. A line that another has said already (the data set, say) is not repeated unless
        it is an error. A line that ``can_wait`` is said as soon as another entrant trains: where none does, the end of
        the sweep says it."""
        if can_wait and self.waiting is not None:
            self.waiting.append(f"{name}: {text}")
        elif is_error or text not in self.said:
            self.said.add(text)
            self.line(f"{name}: {text}")

    def line(self, text: str) -> None:
        """Writes a line above the stages."""
        if self.lines:
            self.console.print(Text(printable(text)), soft_wrap=True)
            self.refresh(at_once=True)

    def refresh(self, at_once: bool = False) -> None:
        """Draws, unless that was done just now."""
        now = time.monotonic()
        if self.console.is_terminal and (at_once or now - self.drawn > DRAW_EVERY_S):
            seconds = now - self.since
            doing = f"{self._doing()} ({seconds:.0f} s)" if seconds >= SIGN_OF_LIFE_S else self._doing()
            self.live.update(Group(self._stages(), self._bar(now), Text(doing, no_wrap=True)), refresh=True)
            self.drawn = time.monotonic()

    def _stages(self) -> Table:
        rows = {}
        for name, folder in self.folders.items():
            shown: dict[str, set[str]] = {}  # the marks of each stage, with the marks of the stages that are part of it
            for stage, mark in self.timetable.marks(folder):
                shown.setdefault(HIDDEN.get(stage, stage), set()).add(mark)
            rows[name] = Text(" ").join(self._sign(stage, marks) for stage, marks in shown.items())
        table = Table.grid(padding=(0, 1))
        if len(self.folders) > 1:  # a run alone needs no name
            room = self.console.width - max(row.cell_len for row in rows.values()) - 2
            table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(room, NAME))
        table.add_column(no_wrap=True, overflow="ellipsis")
        for name, row in rows.items():
            table.add_row(*([Text(name)] if len(self.folders) > 1 else []), row)
        return table

    def _sign(self, stage: str, marks: set[str]) -> Text:
        mark = next(iter(marks)) if len(marks) == 1 else "out" if "out" in marks else "now"
        sign, style = SIGNS[mark]
        return Text(f"{ASCII[sign] if self.console.options.ascii_only else sign} {stage}", style)

    def _bar(self, now: float) -> Table:
        table = Table.grid(padding=(0, 1))
        left, taken = self.timetable.remaining(now), now - self.timetable.began
        if left is not None and not left.is_least:
            self.share = max(self.share, taken / max(taken + left.seconds, 1e-9))  # it never goes back
        text = self._time_left(now, "time left not known yet")
        table.add_row(ProgressBar(total=1.0, completed=self.share, width=24), Text(text, no_wrap=True))
        return table

    def _time_left(self, now: float, unknown: str = "") -> str:
        """Returns the time that is left, in words. The words change when the estimate has moved by a whole step of the
        words: an estimate that goes up and down by less is no news."""
        left = self.timetable.remaining(now)
        if left is None or self.left is None or not left.is_near(self.left):
            self.left = left
        return ", ".join(filter(None, (self.before, str(self.left or unknown), self.after)))

    def _doing(self) -> str:
        return f"{self.stage}: {self.text}" if self.text else self.stage


@contextmanager
def _logs_above(before: tuple[TextIO, TextIO]) -> Iterator[None]:
    """Lets logs that go to a terminal be written above what is drawn there, not into it. ``before`` has stdout and
    stderr as they were before drawing began."""
    now = dict(zip(map(id, before), (sys.stdout, sys.stderr), strict=True))
    streams = [
        (handler, handler.setStream(now[id(handler.stream)]))
        for handler in logging.root.handlers
        if isinstance(handler, logging.StreamHandler) and id(handler.stream) in now
    ]
    try:
        yield
    finally:
        for handler, stream in streams:
            if stream is not None:
                handler.setStream(stream)
