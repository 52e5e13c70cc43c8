"""The terminal of a user while updates are compared: a line says which one, and no warning is about our copies."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from mpcompare.watching.steps import Sum

# cuDNN wants the weights of a recurrent layer in one row. The weights of a copy are cast one by one.
SCATTERED = "RNN module weights are not part of single contiguous chunk of memory"


@contextmanager
def quietly(network: nn.Module) -> Iterator[None]:
    """Warnings that concern our copies of a network are not shown while it is entered."""
    if not any(isinstance(module, nn.RNNBase) for module in network.modules()):
        yield  # a change of the filters makes Python forget which warnings it has shown
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SCATTERED)
        yield


def one_by_one(updates: Sequence[Sum]) -> Iterator[Sum]:
    """Yields each update. Where stderr is a terminal, a line shows which one is compared, until all are:
    a comparison takes as long as many steps."""
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
