"""The update that is compared, as one line of a terminal: a comparison takes as long as many steps."""

import sys
from collections.abc import Iterator, Sequence

from mpcompare.watching.steps import Sum


def one_by_one(updates: Sequence[Sum]) -> Iterator[Sum]:
    """Yields each update. Where stderr is a terminal, it shows which one is compared, until all are."""
    from rich.console import Console  # slow to import
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("comparing update {task.fields[number]} of {task.total}"), BarColumn(), TimeElapsedColumn()
    to_terminal = sys.stdout is not None and sys.stdout.isatty()  # a network's output to a file stays there
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=to_terminal, disable=not console.is_terminal
    ) as progress:
        shown = progress.add_task("", total=len(updates), number=1)
        for done, update in enumerate(updates):
            progress.update(shown, completed=done, number=done + 1)
            yield update
