"""The footprints as a table on a console."""

from collections.abc import Mapping

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpcompare.footprint.count import KINDS, Footprint
from mpcompare.footprint.recipes import FootprintRecipe

PIPE = 160  # characters: a file or a pipe has no width, and is not wrapped at 80


def show(title: str, footprints: Mapping[FootprintRecipe, Footprint | str], kernels: bool) -> None:
    """Prints a column for each recipe, and a row for each kind of bytes; a text in the place of a footprint says why
    there is none. ``kernels``: whether the memory inside of kernels is counted."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE)
    counted = {recipe: f for recipe, f in footprints.items() if isinstance(f, Footprint)}
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("MB")
    for recipe in counted:
        table.add_column(Text(recipe.name), justify="right")
    for kind in KINDS:
        sizes = [f.by_kind.get(kind, 0) for f in counted.values()]
        if any(sizes):
            table.add_row(kind, *(megabytes(size) if size else "-" for size in sizes))
    table.add_section()
    table.add_row("peak", *(megabytes(f.bytes) for f in counted.values()), style="bold")
    table.add_row("in phase", *(f.phase for f in counted.values()))
    console.print(Text(title, style="bold"))
    console.print(table)
    if not kernels:
        console.print(Text("The memory inside of kernels is not counted: --kernels measures it on this CPU."))
    for recipe, why in footprints.items():
        line = f"{recipe.name}: {why if isinstance(why, str) else recipe.meaning}"
        console.print(Text(line, style="red" if isinstance(why, str) else ""), soft_wrap=True)


def megabytes(size: int) -> str:
    """Returns a size in units of 10^6 bytes, to four digits."""
    if 0 < size < 1000:
        return "<0.001"
    return f"{size / 1e6:,.0f}" if size >= 1e9 else f"{size / 1e6:.4g}"
