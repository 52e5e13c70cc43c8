"""The progress of a run or a race: a bar for each entrant on a terminal, plain lines elsewhere; on stderr."""

import time
from collections.abc import Sequence
from types import TracebackType

import rich.console
import rich.progress
from rich.text import Text

from mpcompare.race.turns import Progress

LINE_EVERY_S = 10  # where there is no terminal


class Board:
    """A bar for each name, drawn by its callers: a refreshing thread would run beside the steps that are timed.

    Args:
        names: of the entrants, one bar each.
        lines: whether lines are shown where there is no terminal.
    """

    def __init__(self, names: Sequence[str], lines: bool = True) -> None:
        self.console = rich.console.Console(stderr=True)
        self.lines = lines or self.console.is_terminal
        columns = (
            rich.progress.TextColumn("{task.fields[name]}"),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn("{task.description}"),
        )
        self.bars = rich.progress.Progress(
            *columns, console=self.console, transient=True, auto_refresh=False, disable=not self.console.is_terminal
        )
        # A run alone needs no name.
        self.tasks = {n: self.bars.add_task("waiting", name=n if len(names) > 1 else "", total=None) for n in names}
        self.drawn = dict.fromkeys(names, 0.0)
        self.written = time.monotonic()
        self.said: set[str] = set()

    def __enter__(self) -> "Board":
        self.bars.start()
        self.bars.refresh()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bars.stop()

    def progress(self, name: str, progress: Progress) -> None:
        """Moves a bar; draws at most ten times a second, or writes a line now and then."""
        self.bars.update(self.tasks[name], completed=progress.done, total=progress.total, description=progress.text)
        now = time.monotonic()
        if now - self.drawn[name] > 0.1:
            self.bars.refresh()
            self.drawn[name] = now
        if not self.console.is_terminal and now - self.written > LINE_EVERY_S:
            self.line(f"{name}: {progress.text}")
            self.written = now

    def say(self, name: str, text: str, is_error: bool) -> None:
        """Writes a line of one entrant's. One that another has said already (the data set, say) is not repeated unless
        it is an error."""
        if is_error or text not in self.said:
            self.said.add(text)
            self.line(f"{name}: {text}")

    def line(self, text: str) -> None:
        """Writes a line above the bars."""
        if self.lines:
            self.console.print(Text(text), soft_wrap=True)
            self.bars.refresh()
